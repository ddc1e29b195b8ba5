"""Kernels that compute row by row: norms, activations, the quantization of inputs.

Kernels of other packages call these device functions, so nothing here imports a GEMM or attention.
"""
