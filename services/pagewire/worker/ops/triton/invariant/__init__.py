"""The operations whose results do not depend on the batch, as Triton kernels.

A row has the same bits alone and among others, in a prompt and in a decode step, with a cached or a
shared prefix. This package contains the kernels and tiles that differ from those of `ops.triton`,
and the choice of operations (`ops`). Kernels whose results never depend on the batch stay in
`ops.triton`. See docs/decisions/one-bitwise-answer.md.

Three rules fix the order of additions:

- A GEMM has one accumulator for each result, which adds the columns from the first to the last.
- Attention sums over tiles and segments at fixed positions (`segments`).
- No multiplication and addition are fused (`enable_fp_fusion` is off), because one variant of a
  kernel could fuse operations that another variant does not.
"""
