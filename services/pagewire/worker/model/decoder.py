"""The decoder: one for all families, driven by the model's configuration and a backend's ops."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.kv_cache import KVCache
from pagewire.worker.model.weights import Weights
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.shared_prefix import SharedPrefixItems

# Behind its KV the last layer computes only what is wanted of it.
KINDS_OF_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Prefill:
    """The chunks of a batch, at least one; tensors are int32 on the device."""

    slots: Tensor  # [chunks]
    starts: Tensor  # [chunks + 1], each chunk's first token in the batch, and the last one's end
    lengths: Tensor  # [chunks], KV tokens after the chunk; 0 marks padding
    longest: int  # tokens of the longest chunk


@dataclass(frozen=True, slots=True)
class Wanted:
    """Those tokens of a batch whose logits are wanted; tensors are int32 on the device."""

    rows: Tensor  # [rows], which tokens of the batch
    slots: Tensor  # [rows]
    lengths: Tensor  # [rows], KV tokens, the current one included


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one forward pass: the decode rows, then the prefill chunks one by one.

    All tensors are int32 on the device. `tokens` counts decode rows and the tokens of all chunks.
    """

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]
    num_decodes: int
    decode_lengths: Tensor  # [num_decodes], KV tokens, the current one included
    prefill: Prefill | None
    wanted: Wanted | None = None  # None: all tokens, in order
    shared: SharedPrefixItems | None = None  # of the decode rows
    plan: Any = None  # of their attention: what `ops.plan_decode` has returned


class Decoder:
    """Embedding, layers and head. Holds weights, and no state that a step changes."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, cos_sin: Tensor) -> None:
        """`cos_sin` is the `rope_table` of every position a sequence may have."""
        self.config = config
        self.weights = weights
        self.ops = ops
        self.cos_sin = cos_sin
        self._scale = config.head_dim**-0.5

    def shallow(self) -> "Decoder":
        """The same with the first layers alone, as many as there are kinds."""
        layers = self.weights.layers[:KINDS_OF_LAYERS]
        weights = replace(self.weights, layers=layers)
        config = replace(self.config, num_layers=len(layers))
        return Decoder(config, weights, self.ops, self.cos_sin)

    def hidden(self, batch: Batch, cache: KVCache, block_tables: Tensor) -> Tensor:
        """Writes the KV of the batch's tokens; the residual stream `[rows, hidden]` at the end."""
        residual = self.weights.embedding[batch.token_ids]  # [tokens, hidden]
        if batch.wanted is None:
            return self.layers(residual, batch, cache, block_tables)
        queries, wanted = self.body(residual, batch, cache, block_tables), batch.wanted
        if not len(wanted.rows):
            return residual[:0]
        residual, queries = residual[wanted.rows], queries[wanted.rows]
        return self.finish(residual, queries, wanted.slots, wanted.lengths, cache, block_tables)

    def layers(
        self, residual: Tensor, batch: Batch, cache: KVCache, block_tables: Tensor
    ) -> Tensor:
        """All layers for all tokens: changes the embedded tokens `[tokens, hidden]` in place."""
        batch = self._planned(batch)
        for layer in range(self.config.num_layers):
            self._layer(layer, residual, batch, cache, block_tables)
        return residual

    def body(
        self,
        residual: Tensor,
        batch: Batch,
        cache: KVCache,
        block_tables: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """The layers up to the last one's KV, behind which most tokens of a prompt are done.

        Changes the embedded tokens `[tokens, hidden]` in place; returns the last layer's queries
        `[tokens, heads, head_dim]`, in `out` if that is given.
        """
        batch = self._planned(batch)
        last = self.config.num_layers - 1
        for layer in range(last):
            self._layer(layer, residual, batch, cache, block_tables)
        return self._queries(last, residual, batch, cache, block_tables, out)

    def finish(
        self,
        residual: Tensor,
        queries: Tensor,
        slots: Tensor,
        lengths: Tensor,
        cache: KVCache,
        block_tables: Tensor,
    ) -> Tensor:
        """What the last layer does behind `body`, for some of its tokens.

        The KV of each token's sequence is written: whether it decodes or ends a chunk, it attends
        as a decode row.

        Args:
            residual: `[rows, hidden]`, changed in place.
            queries: `[rows, heads, head_dim]`.
            slots, lengths: `[rows]` int32, as in `Wanted`.
            cache, block_tables: as in `body`.

        Returns:
            `residual`.
        """
        attended = self.ops.decode_attention(
            queries, cache.keys[-1], cache.values[-1], block_tables, slots, lengths, self._scale
        )
        self._behind_attention(-1, attended, residual)
        return residual

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[rows, vocab]`, in the dtype of the weights; written to `out` if that is given."""
        eps, head = self.config.rms_norm_eps, self.weights.head
        return self.ops.norm_linear(hidden, self.weights.norm, eps, head, out=out)

    def _planned(self, batch: Batch) -> Batch:
        """The same with the plan of decode attention, which holds for all layers."""
        if not batch.num_decodes:
            return batch
        config = self.config
        plan = self.ops.plan_decode(
            batch.decode_lengths,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self.weights.embedding.dtype,
            shared=batch.shared,
        )
        return replace(batch, plan=plan)

    def _layer(
        self, layer: int, residual: Tensor, batch: Batch, cache: KVCache, block_tables: Tensor
    ) -> None:
        """Adds one layer to the residual stream `[tokens, hidden]`, in place."""
        queries = self._queries(layer, residual, batch, cache, block_tables)
        attended = self._attend(layer, queries, batch, cache, block_tables)
        self._behind_attention(layer, attended, residual)

    def _queries(
        self,
        layer: int,
        residual: Tensor,
        batch: Batch,
        cache: KVCache,
        block_tables: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Writes a layer's KV; its queries `[tokens, heads, head_dim]`."""
        weights = self.weights.layers[layer]
        return self.ops.norm_qkv_rope_kv_write(
            residual,
            self.config.rms_norm_eps,
            weights.qkv,
            weights.qkv_bias,
            weights.q_norm,
            weights.k_norm,
            self.cos_sin,
            batch.positions,
            batch.slots,
            block_tables,
            cache.keys[layer],
            cache.values[layer],
            out=out,
        )

    def _behind_attention(self, layer: int, attended: Tensor, residual: Tensor) -> None:
        """Adds to `residual [rows, hidden]` what follows on `attended [rows, heads, head_dim]`."""
        ops, eps, weights = self.ops, self.config.rms_norm_eps, self.weights.layers[layer]
        ops.linear_add(attended.flatten(1), weights.output, residual)
        if weights.output_bias is not None:
            residual += weights.output_bias
        gated = ops.norm_gate_up_silu_mul(residual, None, eps, weights.gate_up)
        ops.linear_add(gated, weights.down, residual)

    def _attend(
        self, layer: int, queries: Tensor, batch: Batch, cache: KVCache, block_tables: Tensor
    ) -> Tensor:
        """`[tokens, heads, head_dim]`."""
        keys, values, decodes = cache.keys[layer], cache.values[layer], batch.num_decodes
        out = torch.empty_like(queries)
        if batch.prefill is not None:
            self.ops.prefill_attention(
                queries,
                keys,
                values,
                block_tables,
                batch.prefill.slots,
                batch.prefill.starts,
                batch.prefill.lengths,
                self._scale,
                batch.prefill.longest,
                out=out,
            )
        if decodes:
            self.ops.decode_attention(
                queries[:decodes],
                keys,
                values,
                block_tables,
                batch.slots[:decodes],
                batch.decode_lengths,
                self._scale,
                shared=batch.shared,
                plan=batch.plan,
                beside_prefill=batch.prefill is not None,
                out=out[:decodes],
            )
        return out
