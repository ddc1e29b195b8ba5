"""The torch-free half of a worker: gRPC service, step streams, and the executor that runs steps.

`backend` is the interface to a device. The simulator runs this package with its own backend, so
nothing here may import torch.
"""
