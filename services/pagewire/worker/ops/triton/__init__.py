"""The operations as Triton kernels for NVIDIA GPUs.

A function implements the operation of its name, which `ops.contract` documents, and may take a
`config` of its own. Tests compare each with the function of the same name in `ops.reference`. GEMMs
that these kernels do not compute go to `ops.cublas`.

Most kernels use programmatic dependent launch (PDL): a kernel may start before the kernel launched
before it has ended. `gdc_launch_dependents` allows the next kernel to start. `gdc_wait` waits until
all kernels before have ended and their writes are visible. Every kernel of a chain must wait, or a
kernel that waits for it would not have waited for those before it.
"""
