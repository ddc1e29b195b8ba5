"""Steps as CUDA graphs: decode steps, mixed steps, and sampling that waits for masks.

What eager steps on a GPU need, too, belongs to `runtime`; kernels belong to `ops`.
"""
