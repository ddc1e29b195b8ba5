"""All operations in plain torch: this module implements `contract.ops.Ops`."""

from pagewire.worker.ops.reference.activation import activate as activate
from pagewire.worker.ops.reference.activation import silu_mul as silu_mul
from pagewire.worker.ops.reference.activation import soft_cap as soft_cap
from pagewire.worker.ops.reference.attention import decode_attention as decode_attention
from pagewire.worker.ops.reference.attention import plan_decode as plan_decode
from pagewire.worker.ops.reference.attention import prefill_attention as prefill_attention
from pagewire.worker.ops.reference.attention import shared_prefix_limits as shared_prefix_limits
from pagewire.worker.ops.reference.blocks import copy_blocks as copy_blocks
from pagewire.worker.ops.reference.drafts import begin_drafted as begin_drafted
from pagewire.worker.ops.reference.drafts import end_drafted as end_drafted
from pagewire.worker.ops.reference.experts import add_experts as add_experts
from pagewire.worker.ops.reference.experts import experts_add as experts_add
from pagewire.worker.ops.reference.experts import experts_down as experts_down
from pagewire.worker.ops.reference.experts import (
    experts_gate_up_silu_mul as experts_gate_up_silu_mul,
)
from pagewire.worker.ops.reference.experts import norm_route as norm_route
from pagewire.worker.ops.reference.experts import route as route
from pagewire.worker.ops.reference.experts import sort_by_expert as sort_by_expert
from pagewire.worker.ops.reference.latent import latent_decode_attention as latent_decode_attention
from pagewire.worker.ops.reference.latent import (
    latent_prefill_attention as latent_prefill_attention,
)
from pagewire.worker.ops.reference.latent import latent_rope_kv_write as latent_rope_kv_write
from pagewire.worker.ops.reference.latent import multiply_heads as multiply_heads
from pagewire.worker.ops.reference.latent import plan_latent_decode as plan_latent_decode
from pagewire.worker.ops.reference.linear import linear as linear
from pagewire.worker.ops.reference.linear import linear_add as linear_add
from pagewire.worker.ops.reference.linear import norm_gate_up_silu_mul as norm_gate_up_silu_mul
from pagewire.worker.ops.reference.linear import norm_linear as norm_linear
from pagewire.worker.ops.reference.norm import layer_norm as layer_norm
from pagewire.worker.ops.reference.norm import rms_norm as rms_norm
from pagewire.worker.ops.reference.quantized import arranged as arranged
from pagewire.worker.ops.reference.quantized import grouped_linear as grouped_linear
from pagewire.worker.ops.reference.quantized import grouped_linear_add as grouped_linear_add
from pagewire.worker.ops.reference.quantized import norm_quantize as norm_quantize
from pagewire.worker.ops.reference.quantized import norm_quantize_linear as norm_quantize_linear
from pagewire.worker.ops.reference.quantized import (
    norm_quantize_swiglu_add as norm_quantize_swiglu_add,
)
from pagewire.worker.ops.reference.quantized import quantize as quantize
from pagewire.worker.ops.reference.quantized import quantize_linear_add as quantize_linear_add
from pagewire.worker.ops.reference.quantized import scaled_linear as scaled_linear
from pagewire.worker.ops.reference.quantized import scaled_linear_add as scaled_linear_add
from pagewire.worker.ops.reference.quantized import silu_mul_quantize as silu_mul_quantize
from pagewire.worker.ops.reference.rope import norm_qkv_rope_kv_write as norm_qkv_rope_kv_write
from pagewire.worker.ops.reference.rope import qk_norm_rope_kv_write as qk_norm_rope_kv_write
from pagewire.worker.ops.reference.sampling import await_masks as await_masks
from pagewire.worker.ops.reference.sampling import fetch_masks as fetch_masks
from pagewire.worker.ops.reference.sampling import logprobs as logprobs
from pagewire.worker.ops.reference.sampling import note_time as note_time
from pagewire.worker.ops.reference.sampling import sample as sample
from pagewire.worker.ops.reference.step import begin_decode as begin_decode
from pagewire.worker.ops.reference.step import end_decode as end_decode
from pagewire.worker.ops.reference.step import gather_sampling as gather_sampling
from pagewire.worker.ops.reference.step import start_slots as start_slots
from pagewire.worker.ops.reference.step import write_tables as write_tables
