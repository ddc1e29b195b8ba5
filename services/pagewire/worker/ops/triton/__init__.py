"""The operations as Triton kernels for NVIDIA GPUs.

A function implements the operation of the same name in `ops.contract`, and may accept a `config` as
well. Tests compare it with the function of the same name in `ops.reference`. `ops.cublas` computes
the other GEMMs.

Most kernels use programmatic dependent launch (PDL): a kernel may start before the kernel launched
before it has ended. `gdc_launch_dependents` allows the next kernel to start. `gdc_wait` waits until
all earlier kernels have ended and their writes are visible. This holds only if at least one program
of every kernel in a chain waits: a wait covers earlier kernels only through the kernel directly
before.
"""
