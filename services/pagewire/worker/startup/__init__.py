"""From a configuration to a loaded backend: device, weights, kernels, memory, limits.

Code that runs while the worker serves belongs to `runtime`.
"""
