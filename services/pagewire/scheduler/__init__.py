"""The scheduler: tokenization, continuous batching, and the steps that workers compute.

`server` starts the process, `service` is its gRPC API, `engine` its control loop.
"""
