"""Operations with one order of addition: this module implements `contract.ops.Ops`.

`layer_norm`, `activate`, `soft_cap` and the operations of experts, latent attention and quantized
weights are the usual ones, whose bits were not compared. Workers refuse models that need them
(`startup.one_answer`).
"""

from pagewire.worker.ops.triton.blocks import copy_blocks as copy_blocks
from pagewire.worker.ops.triton.drafts.begin import begin_drafted as begin_drafted
from pagewire.worker.ops.triton.drafts.end import end_drafted as end_drafted
from pagewire.worker.ops.triton.experts import add_experts as add_experts
from pagewire.worker.ops.triton.experts import experts_add as experts_add
from pagewire.worker.ops.triton.experts import experts_down as experts_down
from pagewire.worker.ops.triton.experts import experts_gate_up_silu_mul as experts_gate_up_silu_mul
from pagewire.worker.ops.triton.experts import norm_route as norm_route
from pagewire.worker.ops.triton.experts import route as route
from pagewire.worker.ops.triton.experts import sort_by_expert as sort_by_expert
from pagewire.worker.ops.triton.invariant.activation import silu_mul as silu_mul
from pagewire.worker.ops.triton.invariant.decode import decode_attention as decode_attention
from pagewire.worker.ops.triton.invariant.decode import plan_decode as plan_decode
from pagewire.worker.ops.triton.invariant.linear import linear as linear
from pagewire.worker.ops.triton.invariant.linear import linear_add as linear_add
from pagewire.worker.ops.triton.invariant.linear import (
    norm_gate_up_silu_mul as norm_gate_up_silu_mul,
)
from pagewire.worker.ops.triton.invariant.linear import norm_linear as norm_linear
from pagewire.worker.ops.triton.invariant.norm import rms_norm as rms_norm
from pagewire.worker.ops.triton.invariant.prefill import prefill_attention as prefill_attention
from pagewire.worker.ops.triton.invariant.quantized import (
    norm_quantize_linear as norm_quantize_linear,
)
from pagewire.worker.ops.triton.invariant.quantized import (
    norm_quantize_swiglu_add as norm_quantize_swiglu_add,
)
from pagewire.worker.ops.triton.invariant.quantized import (
    quantize_linear_add as quantize_linear_add,
)
from pagewire.worker.ops.triton.invariant.rope import (
    norm_qkv_rope_kv_write as norm_qkv_rope_kv_write,
)
from pagewire.worker.ops.triton.invariant.rope import qk_norm_rope_kv_write as qk_norm_rope_kv_write
from pagewire.worker.ops.triton.invariant.sampling import logprobs as logprobs
from pagewire.worker.ops.triton.invariant.sampling import sample as sample
from pagewire.worker.ops.triton.invariant.shared_prefix import (
    shared_prefix_limits as shared_prefix_limits,
)
from pagewire.worker.ops.triton.latent import latent_decode_attention as latent_decode_attention
from pagewire.worker.ops.triton.latent import latent_prefill_attention as latent_prefill_attention
from pagewire.worker.ops.triton.latent import latent_rope_kv_write as latent_rope_kv_write
from pagewire.worker.ops.triton.latent import multiply_heads as multiply_heads
from pagewire.worker.ops.triton.latent import plan_latent_decode as plan_latent_decode
from pagewire.worker.ops.triton.masks import await_masks as await_masks
from pagewire.worker.ops.triton.masks import fetch_masks as fetch_masks
from pagewire.worker.ops.triton.masks import note_time as note_time
from pagewire.worker.ops.triton.quantized.grouped import grouped_linear as grouped_linear
from pagewire.worker.ops.triton.quantized.grouped import grouped_linear_add as grouped_linear_add
from pagewire.worker.ops.triton.quantized.linear import arranged as arranged
from pagewire.worker.ops.triton.quantized.scaled import scaled_linear as scaled_linear
from pagewire.worker.ops.triton.quantized.scaled import scaled_linear_add as scaled_linear_add
from pagewire.worker.ops.triton.rowwise.activation import activate as activate
from pagewire.worker.ops.triton.rowwise.activation import soft_cap as soft_cap
from pagewire.worker.ops.triton.rowwise.norm import layer_norm as layer_norm
from pagewire.worker.ops.triton.rowwise.quantize import norm_quantize as norm_quantize
from pagewire.worker.ops.triton.rowwise.quantize import quantize as quantize
from pagewire.worker.ops.triton.rowwise.quantize import silu_mul_quantize as silu_mul_quantize
from pagewire.worker.ops.triton.step import begin_decode as begin_decode
from pagewire.worker.ops.triton.step import end_decode as end_decode
from pagewire.worker.ops.triton.step import gather_sampling as gather_sampling
from pagewire.worker.ops.triton.step import start_slots as start_slots
from pagewire.worker.ops.triton.step import write_tables as write_tables
