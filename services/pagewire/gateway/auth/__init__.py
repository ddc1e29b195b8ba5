"""API keys at the HTTP port: which requests are accepted, and what they cost their key.

How keys are stored and counted belongs to `pagewire.auth`, which schedulers use as well.
"""
