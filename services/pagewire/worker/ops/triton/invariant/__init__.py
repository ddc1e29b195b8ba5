"""The operations whose results do not depend on the batch, as Triton kernels.

A row has the same bits alone and among others, in a prompt and in a decode step, with a cached or a
shared prefix. Here belong the kernels and tiles that differ from those of `ops.triton`, and the
choice of operations (`ops`). Kernels whose results do not depend on the batch anyway stay there.
See docs/decisions/one-bitwise-answer.md.

Three rules make the order of additions one:

- A GEMM has one accumulator for each result, which takes the columns from the first to the last.
- Attention sums over tiles and segments at fixed positions (`segments`).
- No multiplication and addition become one instruction (`enable_fp_fusion` is off), because one
  variant of a kernel could fuse what another does not.
"""
