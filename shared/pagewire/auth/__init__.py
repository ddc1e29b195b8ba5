"""API keys, their limits, and an account of each key's use.

Gateways and schedulers use it. HTTP and gRPC are left to them: a refusal is a RequestError here.
"""
