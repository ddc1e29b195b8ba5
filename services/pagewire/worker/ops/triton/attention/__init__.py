"""Attention kernels over the paged KV cache.

Decode attention cuts its work into shares (`shares`), attends (`decode`, `decode_kernel`,
`shared_prefix`) and merges partial results (`merge`). Prefill attention has one kernel for all
devices and one for Hopper.
"""

from pagewire.worker.ops.triton.attention.decode import decode_attention, plan_decode
from pagewire.worker.ops.triton.attention.prefill import prefill_attention
from pagewire.worker.ops.triton.attention.shared_prefix import shared_prefix_limits

__all__ = ["decode_attention", "plan_decode", "prefill_attention", "shared_prefix_limits"]
