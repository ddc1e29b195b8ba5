"""The model: configuration, checkpoint, weights, rotary table, KV cache and decoder.

How a step runs on a device belongs to `runtime`; kernels belong to `ops`.
"""
