"""One request: from a client's message to sequences, and from tokens to the client's deltas.

Scheduling belongs to `core`, text to `text`, and work across queue and workers to `stages`.
"""
