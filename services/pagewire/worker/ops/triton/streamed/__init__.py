"""Products of few tokens on Hopper, for which the copy engine loads weights ahead.

`gemm` is for plain weights in sixteen bits, `scaled` for FP8 weights with one scale per channel,
and `experts` for one token and FP8 experts.
"""
