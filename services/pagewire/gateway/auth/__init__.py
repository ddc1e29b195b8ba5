"""API keys at the HTTP port: which requests are accepted, and what they cost their key.

`pagewire.auth` stores keys and counts their use; schedulers use it too.
"""
