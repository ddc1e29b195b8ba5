"""Attention over the paged KV cache."""

from pagewire.worker.ops.triton.attention_decode import decode_attention
from pagewire.worker.ops.triton.attention_prefill import prefill_attention

__all__ = ["decode_attention", "prefill_attention"]
