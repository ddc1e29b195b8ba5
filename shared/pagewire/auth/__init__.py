"""API keys, their limits, and an account of each key's use.

Gateways and schedulers use it, and map its RequestErrors to HTTP and gRPC.
"""
