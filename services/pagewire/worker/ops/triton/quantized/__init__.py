"""GEMMs with quantized weights. What quantizes their inputs is `quantize`, beside this room.

Weights are the left operand, and tiles have a multiple of 64 of their rows, so that Hopper uses one
kind of matrix instruction for one token and for thousands. The order of a token's sums thus does
not depend on the number of tokens.
"""
