"""One request's life: from a client's message to sequences, and from tokens to its deltas.

Scheduling belongs to `core`, and text to `text`.
"""
