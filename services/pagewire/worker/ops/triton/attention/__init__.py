"""Attention over the paged KV cache."""

from pagewire.worker.ops.triton.attention.decode import decode_attention, plan_decode
from pagewire.worker.ops.triton.attention.prefill import prefill_attention

__all__ = ["decode_attention", "plan_decode", "prefill_attention"]
