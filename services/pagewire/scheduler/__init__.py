"""The scheduler: tokenization, continuous batching, and the steps that workers compute.

`server` starts the process, `service` is its gRPC API, `engine` its control loop. `core` makes the
decisions, without I/O; `stages` applies them to requests and workers.
"""
