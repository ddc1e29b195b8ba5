"""The transformer decoder: one implementation for all families, over the operations of `Ops`.

`fused_layer` and `general_layer` compute the parts of a layer around attention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.fused_layer import FusedLayer, is_fused
from pagewire.worker.model.general_layer import GeneralLayer
from pagewire.worker.model.kv_cache import KVCache
from pagewire.worker.model.latent_layer import LatentLayer
from pagewire.worker.model.weights import Weights
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.shared_prefix import SharedPrefixItems


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prefill chunks of a batch, at least one. Tensors are int32 on the device."""

    slots: Tensor  # [chunks]
    starts: Tensor  # [chunks + 1], first token of each chunk in the batch, then the last one's end
    lengths: Tensor  # [chunks], KV tokens after the chunk; 0 marks padding
    longest: int  # tokens of the longest chunk


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of a batch that need logits. Tensors are int32 on the device."""

    rows: Tensor  # [rows], indices of the tokens in the batch
    slots: Tensor  # [rows]
    lengths: Tensor  # [rows], KV tokens, the current one included


@dataclass(slots=True)
class LayerInputs:
    """Keeps the inputs of some layers for a batch: the residual stream before each of them."""

    layers: tuple[int, ...]
    states: Tensor | None = None  # [tokens, layers, hidden], in the order of `layers`

    def take(self, layer: int, residual: Tensor) -> None:
        """Copies `residual [tokens, hidden]`, which later layers change, if `layer` is wanted."""
        for place, wanted in enumerate(self.layers):
            if wanted == layer:
                if self.states is None:
                    tokens, hidden = residual.shape
                    self.states = residual.new_empty(tokens, len(self.layers), hidden)
                self.states[:, place] = residual


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one forward pass: the decode rows, then the prefill chunks in order.

    Tensors are int32 on the device. The dimension `tokens` counts decode rows and chunk tokens.
    """

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]
    num_decodes: int
    decode_lengths: Tensor  # [num_decodes], KV tokens, the current one included
    prefill: Prefill | None
    sampled: SampledTokens | None = None  # None: all tokens, in order
    shared: SharedPrefixItems | None = None  # of the decode rows
    # The results of `ops.plan_decode` for the decode rows, by the window of a layer.
    plans: Mapping[int | None, Any] = field(default_factory=dict)
    inputs: LayerInputs | None = None  # filled while the layers run


class Decoder:
    """Embedding, layers and head. It has weights, but no state that a step changes."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        tables: tuple[Tensor, ...],
        form: FusedLayer | None = None,
    ) -> None:
        """`tables` are the `rope_tables` of all positions of a sequence.

        `form` computes the parts of a layer around attention; None: the configuration chooses it.
        """
        self.config = config
        self.weights = weights
        self.ops = ops
        self.tables = tables
        self._scale = config.attention_scale
        # By layer. None for a window that no sequence exceeds: attention without one is faster.
        longest, cap = len(tables[0]), config.attention_soft_cap
        self.windows = [w if w is not None and w < longest else None for w in config.windows]
        self._options: list[dict[str, Any]] = [
            {} if window is None and cap is None else {"window": window, "soft_cap": cap}
            for window in self.windows
        ]
        for options, layer in zip(self._options, weights.layers, strict=True):
            if layer.sinks is not None:
                options["sinks"] = layer.sinks
        # Rounded to the type of the weights, as Gemma's factor is.
        factor = torch.tensor(config.embedding_multiplier, dtype=weights.embedding.dtype)
        self._embedding_multiplier = None if factor == 1 else float(factor)
        # Computes the parts of a layer around attention.
        self._form: FusedLayer | GeneralLayer
        self._latent: LatentLayer | None = None
        if form is not None:
            self._form = form
        elif config.latent is not None:
            self._form = self._latent = LatentLayer(config, config.latent, ops)
        else:
            self._form = (FusedLayer if is_fused(config) else GeneralLayer)(config, ops)

    def with_sample_layers(self) -> "Decoder":
        """A decoder with only one layer of each kind (`ModelConfig.sample_layers`)."""
        kept = self.config.sample_layers()
        weights = replace(self.weights, layers=tuple(self.weights.layers[i] for i in kept))
        tables = tuple(self.tables[i] for i in kept)
        return Decoder(self.config.with_layers(kept), weights, self.ops, tables)

    def hidden(self, batch: Batch, cache: KVCache, block_tables: Tensor) -> Tensor:
        """Writes the KV of the batch's tokens and returns the final residual stream.

        Returns:
            `[rows, hidden]`, one row for each token of `batch.sampled`.
        """
        residual = self.weights.embedding[batch.token_ids]  # [tokens, hidden]
        if batch.sampled is None:
            return self.layers(residual, batch, cache, block_tables)
        queries = self.body(residual, batch, cache, block_tables)
        return self.sampled_hidden(residual, queries, batch.sampled, cache, block_tables)

    def sampled_hidden(
        self,
        residual: Tensor,
        queries: Tensor,
        sampled: SampledTokens,
        cache: KVCache,
        block_tables: Tensor,
    ) -> Tensor:
        """The final residual stream `[rows, hidden]` of some tokens of `body`.

        `residual [tokens, hidden]` and `queries [tokens, heads, query_dim]` are those of `body`,
        and stay unchanged.
        """
        if not len(sampled.rows):
            return residual[:0]
        residual, queries = residual[sampled.rows], queries[sampled.rows]
        return self.finish_last_layer(
            residual, queries, sampled.slots, sampled.lengths, cache, block_tables
        )

    def layers(
        self,
        residual: Tensor,
        batch: Batch,
        cache: KVCache,
        block_tables: Tensor,
        late: Callable[[], None] | None = None,
    ) -> Tensor:
        """Runs all layers for all tokens. Changes `residual [tokens, hidden]` in place.

        `late` is called when three quarters of the layers are queued.
        """
        batch = self._begun(residual, batch, cache)
        last_quarter = self.config.num_layers * 3 // 4
        for layer in range(self.config.num_layers):
            if layer == last_quarter and late is not None:
                late()
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
        """Runs all layers except the last, and the last one up to its queries and its KV.

        Most prompt tokens need no more. `finish_last_layer` computes the rest.

        Args:
            residual: `[tokens, hidden]`, the embedded tokens; changed in place.
            batch, cache, block_tables: as in `hidden`.
            out: where to write the result; None allocates it.

        Returns:
            The queries of the last layer, `[tokens, heads, head_dim]`.
        """
        batch = self._begun(residual, batch, cache)
        last = self.config.num_layers - 1
        for layer in range(last):
            self._layer(layer, residual, batch, cache, block_tables)
        return self._queries(last, residual, batch, cache, block_tables, out)

    def finish_last_layer(
        self,
        residual: Tensor,
        queries: Tensor,
        slots: Tensor,
        lengths: Tensor,
        cache: KVCache,
        block_tables: Tensor,
    ) -> Tensor:
        """Runs the last layer's attention and MLP for some tokens of `body`.

        Each token attends as a decode row, the last token of a chunk included, because the KV of
        its sequence is written already.

        Args:
            residual: `[rows, hidden]`, changed in place.
            queries: `[rows, heads, head_dim]`.
            slots, lengths: `[rows]` int32, as in `SampledTokens`.
            cache, block_tables: as in `body`.

        Returns:
            `residual`.
        """
        if self._latent is not None:
            attended = self._latent.attend(
                self.weights.layers[-1],
                queries,
                cache.keys[-1],
                block_tables,
                decode=(slots, lengths),
            )
        else:
            attended = self.ops.decode_attention(
                queries,
                cache.keys[-1],
                cache.values[-1],
                block_tables,
                slots,
                lengths,
                self._scale,
                scales=cache.scales[-1],
                **self._options[-1],
            )
        self._form.after_attention(self.weights.layers[-1], attended, residual)
        return residual

    def last_attention(
        self, queries: Tensor, prefill: Prefill, cache: KVCache, block_tables: Tensor
    ) -> Tensor:
        """The last layer's attention of whole chunks: `[tokens, heads, head_dim]`, as `queries`.

        `queries` are rows of the result of `body`, those of `prefill` one after the other.
        """
        if self._latent is not None:
            return self._latent.attend(
                self.weights.layers[-1], queries, cache.keys[-1], block_tables, prefill
            )
        return self.ops.prefill_attention(
            queries,
            cache.keys[-1],
            cache.values[-1],
            block_tables,
            prefill.slots,
            prefill.starts,
            prefill.lengths,
            self._scale,
            prefill.longest,
            scales=cache.scales[-1],
            **self._options[-1],
        )

    def after_last_attention(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The rest of the last layer for some tokens; changes `residual [rows, hidden]` in place.

        `attended [rows, heads, head_dim]` are rows of the result of `last_attention`.
        """
        self._form.after_attention(self.weights.layers[-1], attended, residual)
        return residual

    def last_states(self, hidden: Tensor) -> Tensor:
        """The input of the head, `[rows, hidden]` of `hidden [rows, hidden]`."""
        weights, eps = self.weights, self.config.norm_eps
        if self.config.norm == "layer":
            return self.ops.layer_norm(hidden, weights.norm, weights.norm_bias, eps)
        return self.ops.rms_norm(hidden, weights.norm, eps)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The logits `[rows, vocab]` of `hidden [rows, hidden]`, in the dtype of the weights."""
        return self._form.head(self.weights, hidden, out)

    def _begun(self, residual: Tensor, batch: Batch, cache: KVCache) -> Batch:
        """Scales the embedded tokens in place; returns the batch with plans of decode attention."""
        if self._embedding_multiplier is not None:
            residual.mul_(self._embedding_multiplier)
        return self._planned(batch, cache)

    def _planned(self, batch: Batch, cache: KVCache) -> Batch:
        """The batch with its plans of decode attention, one for each window of a layer."""
        if not batch.num_decodes:
            return batch
        config = self.config
        if self._latent is not None:
            plan = self._latent.plan(batch.decode_lengths, self.weights.embedding.dtype)
            return replace(batch, plans={None: plan})
        plans = {
            window: self.ops.plan_decode(
                batch.decode_lengths,
                config.num_heads,
                config.num_kv_heads,
                config.served_head_dim,
                self.weights.embedding.dtype,
                shared=batch.shared,
                window=window,
                fp8=cache.scale_storage is not None,
            )
            for window in dict.fromkeys(self.windows)
        }
        return replace(batch, plans=plans)

    def _layer(
        self, layer: int, residual: Tensor, batch: Batch, cache: KVCache, block_tables: Tensor
    ) -> None:
        """Adds one layer to the residual stream `[tokens, hidden]`, in place."""
        queries = self._queries(layer, residual, batch, cache, block_tables)
        attended = self._attend(layer, queries, batch, cache, block_tables)
        self._form.after_attention(self.weights.layers[layer], attended, residual)

    def _queries(
        self,
        layer: int,
        residual: Tensor,
        batch: Batch,
        cache: KVCache,
        block_tables: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Writes the KV of a layer and returns its queries `[tokens, heads, head_dim]`."""
        if batch.inputs is not None:
            batch.inputs.take(layer, residual)
        return self._form.queries(
            self.weights.layers[layer],
            residual,
            self.tables[layer],
            batch.positions,
            batch.slots,
            block_tables,
            cache.keys[layer],
            cache.values[layer],
            cache.scales[layer],
            out,
        )

    def _attend(
        self, layer: int, queries: Tensor, batch: Batch, cache: KVCache, block_tables: Tensor
    ) -> Tensor:
        """Attention of all tokens of a batch: `[tokens, heads, head_dim]`, as `queries`."""
        keys, values, scales = cache.keys[layer], cache.values[layer], cache.scales[layer]
        decodes = batch.num_decodes
        if self._latent is not None:
            return self._latent.attend(
                self.weights.layers[layer],
                queries,
                keys,
                block_tables,
                batch.prefill,
                (batch.slots[:decodes], batch.decode_lengths) if decodes else None,
                batch.plans.get(None),
            )
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
                scales=scales,
                out=out,
                **self._options[layer],
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
                scales=scales,
                shared=batch.shared,
                plan=batch.plans[self.windows[layer]],
                beside_prefill=batch.prefill is not None,
                out=out[:decodes],
                **self._options[layer],
            )
        return out
