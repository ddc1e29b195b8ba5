"""The worker's operations as Triton kernels for NVIDIA GPUs, twins of `ops.reference`."""
