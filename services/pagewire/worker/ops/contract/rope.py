"""From the residual stream to queries, cached keys and cached values."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pagewire.worker.ops.contract.blocks import KVScales


class RopeOps(Protocol):
    """The operations of a layer before attention."""

    def norm_qkv_rope_kv_write(
        self,
        x: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        scales: KVScales | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `qk_norm_rope_kv_write` of `norm_linear(x, None, eps, weight, bias)`.

        Args:
            x: `[tokens, hidden]`.
            eps: added to the mean square, in both norms.
            weight: `[(query_heads + 2 * kv_heads) * head_dim, hidden]`, already multiplied by the
                weight of the layer's norm.
            bias: `[(query_heads + 2 * kv_heads) * head_dim]` or None.
            q_norm, k_norm, cos_sin, positions, slots, block_tables, k_cache, v_cache, scales, out:
                as in `qk_norm_rope_kv_write`.

        Returns:
            Queries `[tokens, query_heads, head_dim]` in the dtype of `x`.
        """

    def qk_norm_rope_kv_write(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        scales: KVScales | None = None,
        unscaled: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Turn the QKV projection into rotated queries and cached keys and values.

        Each query and key head is RMS-normalized if a norm weight is given, then rotated by the
        position of its token (Su et al., 2021, "RoFormer"). The two halves of a head are the real
        and the imaginary parts, as in the Llama family. Everything is computed in float32 and
        rounded once. Keys and values go to row `position % block_size` of block
        `block_tables[slot, position // block_size]`.

        Args:
            qkv: `[tokens, (query_heads + 2 * kv_heads) * head_dim]`: queries, keys, values.
            q_norm, k_norm: `[head_dim]` weights of the norm of each head, or None for no norm.
            eps: added to the mean square, as in `rms_norm`.
            cos_sin: `[max_positions, head_dim]` float32, cosines in the first half of a row and
                sines in the second.
            positions, slots: `[tokens]` int32. Tokens of the padding slot write to scratch
                block 0.
            block_tables: `[slots, max_blocks]` int32.
            k_cache, v_cache: `[num_blocks, kv_heads, block_size, head_dim]`, written in place.
            scales: of caches in float8_e4m3fn, written in place; None for other caches. Keys and
                values are divided by their scale and rounded to the nearest, half to even.
            unscaled: `[tokens, hidden]` or None. If given, `qkv` was computed from `unscaled`
                instead of its RMSNorm. `qkv` is then first divided by the root mean square of
                `unscaled`.
            out: `[tokens, query_heads, head_dim]` for the queries, or None for a new tensor.

        Returns:
            Queries `[tokens, query_heads, head_dim]` in the dtype of `qkv`: `out` if given.
        """
