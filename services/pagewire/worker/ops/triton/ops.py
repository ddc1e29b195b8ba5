"""All operations as Triton kernels: this module implements `contract.ops.Ops`."""

from pagewire.worker.ops.triton.activation import silu_mul as silu_mul
from pagewire.worker.ops.triton.attention import decode_attention as decode_attention
from pagewire.worker.ops.triton.attention import plan_decode as plan_decode
from pagewire.worker.ops.triton.attention import prefill_attention as prefill_attention
from pagewire.worker.ops.triton.attention import shared_prefix_limits as shared_prefix_limits
from pagewire.worker.ops.triton.blocks import copy_blocks as copy_blocks
from pagewire.worker.ops.triton.linear import linear as linear
from pagewire.worker.ops.triton.linear import linear_add as linear_add
from pagewire.worker.ops.triton.linear import norm_gate_up_silu_mul as norm_gate_up_silu_mul
from pagewire.worker.ops.triton.linear import norm_linear as norm_linear
from pagewire.worker.ops.triton.logprobs import logprobs as logprobs
from pagewire.worker.ops.triton.masks import mask_logits as mask_logits
from pagewire.worker.ops.triton.norm import rms_norm as rms_norm
from pagewire.worker.ops.triton.rope import norm_qkv_rope_kv_write as norm_qkv_rope_kv_write
from pagewire.worker.ops.triton.rope import qk_norm_rope_kv_write as qk_norm_rope_kv_write
from pagewire.worker.ops.triton.sampling import sample as sample
from pagewire.worker.ops.triton.step import begin_decode as begin_decode
from pagewire.worker.ops.triton.step import end_decode as end_decode
from pagewire.worker.ops.triton.step import gather_sampling as gather_sampling
