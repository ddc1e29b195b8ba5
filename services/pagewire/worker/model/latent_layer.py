"""Layers with latent attention, in the operations of `LatentOps`, and otherwise Llama's form."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.config.latent import LATENT_NORM_EPS, LatentConfig
from pagewire.worker.model.fused_layer import FusedLayer, is_fused
from pagewire.worker.model.weights import LayerWeights
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.blocks import KVScales

if TYPE_CHECKING:
    from pagewire.worker.model.decoder import Prefill


class LatentLayer(FusedLayer):
    """Computes latent attention and the parts of a layer around it.

    Between `queries` and attention, a query has `query_dim` values, fewer than attention reads.
    Only tokens that attend are multiplied by the larger matrices.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, ops: Ops) -> None:
        super().__init__(config, ops)
        assert is_fused(config)  # the table has no other families with latent attention
        self._latent = latent
        self._heads = config.num_heads
        self._scale = config.attention_scale

    def queries(
        self,
        weights: LayerWeights,
        residual: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        keys: Tensor,
        values: Tensor,
        scales: KVScales | None,
        out: Tensor | None,
    ) -> Tensor:
        """Writes the latent vectors of a layer and returns its queries, as `FusedLayer.queries`.

        `keys` is the layer's cache; `values` is the same, and there are no scales.
        """
        assert isinstance(weights.qkv, Tensor)
        assert weights.k_norm is not None
        ops, width = self._ops, self._latent.cached_dim
        projected = ops.norm_linear(residual, None, self._eps, weights.qkv)
        first, latent = projected[:, :-width], projected[:, -width:]
        if weights.query_up is not None:
            assert isinstance(weights.query_up, Tensor)
            normed = ops.rms_norm(first, weights.q_norm, LATENT_NORM_EPS)
            flat = None if out is None else out.flatten(1)
            first = ops.linear(normed, weights.query_up, out=flat)
        queries = first.unflatten(1, (self._heads, -1))
        return ops.latent_rope_kv_write(
            queries,
            latent,
            weights.k_norm,
            LATENT_NORM_EPS,
            cos_sin,
            positions,
            slots,
            block_tables,
            keys,
            out=out if weights.query_up is None else queries,
        )

    def plan(self, lengths: Tensor, dtype: torch.dtype) -> Any:
        """The plan of `decode` for rows of these lengths `[rows]`, for all layers."""
        return self._ops.plan_latent_decode(lengths, self._heads, self._latent.rank, dtype)

    def attend(
        self,
        weights: LayerWeights,
        queries: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        prefill: "Prefill | None" = None,
        decode: tuple[Tensor, Tensor] | None = None,
        plan: Any = None,
    ) -> Tensor:
        """Attention of some tokens: decode rows, then the chunks of prefill.

        Args:
            weights: those of the layer.
            queries: `[tokens, heads, query_dim]`, as `queries` returned them.
            cache: the layer's, `[num_blocks, 1, block_size, cached_dim]`.
            block_tables: `[slots, max_blocks]` int32.
            prefill: the chunks, or None.
            decode: slots and lengths `[rows]` int32 of the first tokens. A row of negative length
                belongs to a chunk.
            plan: the result of `plan` for the decode rows, or None.

        Returns:
            `[tokens, heads, value_dim]`.
        """
        assert isinstance(weights.kv_up, Tensor)
        ops, latent = self._ops, self._latent
        # [heads, plain_dim + value_dim, rank]
        up = weights.kv_up.unflatten(0, (self._heads, -1))
        plain, rotated = queries.split([latent.plain_dim, latent.rotated_dim], dim=2)
        absorbed = ops.multiply_heads(plain, up[:, : latent.plain_dim])
        attended = absorbed.new_empty(absorbed.shape)
        if prefill is not None:
            ops.latent_prefill_attention(
                absorbed,
                rotated,
                cache,
                block_tables,
                prefill.slots,
                prefill.starts,
                prefill.lengths,
                self._scale,
                prefill.longest,
                out=attended,
            )
        if decode is not None:
            slots, lengths = decode
            rows = len(slots)
            ops.latent_decode_attention(
                absorbed[:rows],
                rotated[:rows],
                cache,
                block_tables,
                slots,
                lengths,
                self._scale,
                plan=plan,
                out=attended[:rows],
            )
        return ops.multiply_heads(attended, up[:, latent.plain_dim :].transpose(1, 2))
