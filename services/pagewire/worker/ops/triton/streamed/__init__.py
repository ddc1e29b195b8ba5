"""The GEMM of few tokens on Hopper, whose weights are copied ahead by the copy engine."""
