"""What a worker measures of its device before it serves. Needs a backend, not torch."""
