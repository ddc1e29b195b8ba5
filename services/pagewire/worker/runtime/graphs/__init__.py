"""Steps as CUDA graphs: decode steps, mixed steps, and sampling that waits for masks.

Code that eager steps on a GPU also need belongs to `runtime`; kernels belong to `ops`.
"""
