"""Kernels of latent attention (`contract.latent`).

`write` rotates queries and fills the cache. `decode` attends from decode rows, cut into equal
shares as in `attention.decode`. `prefill` attends from chunks. All query heads of a token read the
same vectors of the cache, so a tile of heads replaces the query heads of one KV head. A vector is
read once and used twice, as key and as value. It has 512 + 64 values in DeepSeek's models, but tile
sizes are powers of two. So scores are computed in two products, one with the latent vector and one
with the rotated key.

These kernels do not start before the preceding kernel has ended, and no kernel starts before they
have ended.
"""

from pagewire.worker.ops.triton.latent.decode import latent_decode_attention, plan_latent_decode
from pagewire.worker.ops.triton.latent.heads import multiply_heads
from pagewire.worker.ops.triton.latent.prefill import latent_prefill_attention
from pagewire.worker.ops.triton.latent.write import latent_rope_kv_write

__all__ = [
    "latent_decode_attention",
    "latent_prefill_attention",
    "latent_rope_kv_write",
    "multiply_heads",
    "plan_latent_decode",
]
