"""GEMMs with quantized weights; `rowwise.quantize` quantizes their inputs.

Weights are the left operand, and tiles have a multiple of 64 weight rows, so that Hopper uses one
kind of matrix instruction for one token and for thousands. So the order of a token's sums does not
depend on the number of tokens.
"""
