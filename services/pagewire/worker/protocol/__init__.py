"""The torch-free half of a worker: its gRPC service, step streams, and the engine that runs steps.

The simulator runs exactly this with a backend of its own. `backend` is the interface to a device.
"""
