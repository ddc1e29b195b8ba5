"""The model: configuration, checkpoint, weights, rotary table, KV cache and decoder.

`runtime` runs steps on a device; kernels belong to `ops`.
"""
