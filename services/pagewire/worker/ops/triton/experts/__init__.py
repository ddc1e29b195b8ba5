"""The kernels of a mixture of experts; `layer` chooses among them.

`routing` chooses experts, `rows` sorts tokens by expert, and `projections` multiplies the rows of
each expert by its weights: plain ones (`gemm`, and `hopper` for many tokens), weights and inputs in
eight bits (`scaled_gemm`), or packed weights (`packed_gemm`). `config` has the tiles, which
`tuning` may measure. `weighted_sum` adds the results to the residual stream. Few tokens are not
sorted: `vector` and `packed_vector` compute their experts, and `streamed.experts` those of one
token with FP8 weights.

No kernel uses atomics and no grid depends on the router's choice, so a step can be captured in a
graph. Other tokens do not change the order of a token's sums, except that few tokens have another
order than many.
"""

from pagewire.worker.ops.triton.experts.layer import experts_add, norm_route
from pagewire.worker.ops.triton.experts.projections import experts_down, experts_gate_up_silu_mul
from pagewire.worker.ops.triton.experts.routing import route
from pagewire.worker.ops.triton.experts.rows import sort_by_expert
from pagewire.worker.ops.triton.experts.weighted_sum import add_experts

__all__ = [
    "add_experts",
    "experts_add",
    "experts_down",
    "experts_gate_up_silu_mul",
    "norm_route",
    "route",
    "sort_by_expert",
]
