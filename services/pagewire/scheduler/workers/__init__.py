"""The workers: a link to each, the limits of each, and the sequences on it.

Decisions about sequences belong to `core`, and requests to `requests`.
"""
