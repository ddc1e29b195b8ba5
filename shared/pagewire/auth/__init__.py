"""API keys, what each may ask for, and what it has used.

Both servers that clients reach use it. Nothing in here knows HTTP or gRPC.
"""
