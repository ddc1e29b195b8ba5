"""The GEMM of few tokens on Hopper, for which the copy engine loads weights ahead.

Only plain weights in sixteen bits: quantized ones belong to `quantized`, those of experts to
`experts`.
"""
