"""Steps: decoded, checked against the slots, and turned into plans for a backend."""
