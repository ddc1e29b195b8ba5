"""Layers of every form that a family can declare, with fused operations where they exist.

All quantized models have these layers, because operations of their own multiply their matrices.
"""

from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.expert_mlp import ExpertMlp
from pagewire.worker.model.linear import linear, linear_add, norm_linear
from pagewire.worker.model.weights import LayerWeights, Weights
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.contract.quantized import LinearWeight, QuantizedInput, ScaledWeight


class GeneralLayer:
    """Computes the parts of a layer around attention; see `FusedLayer` for the methods."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        self._config = config
        self._ops = ops
        self._eps = config.norm_eps
        self._gated_silu = config.gated and config.activation == "silu"
        self._swiglu = (
            config.norm != "layer"
            and config.block in ("pre", "sandwich")
            and self._gated_silu
            and not config.mlp_bias
        )
        self._experts = None if config.experts is None else ExpertMlp(config, config.experts, ops)

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
        """See `FusedLayer.queries`."""
        where = (cos_sin, positions, slots, block_tables, keys, values)
        ops, eps, per_head = self._ops, self._eps, self._config.qk_norm == "head"
        norms = (weights.q_norm, weights.k_norm) if per_head else (None, None)
        folded = self._config.norms_folded and self._config.qk_norm != "projection"
        if folded and isinstance(weights.qkv, Tensor):
            return ops.norm_qkv_rope_kv_write(
                residual,
                eps,
                weights.qkv,
                weights.qkv_bias,
                *norms,
                *where,
                scales=scales,
                out=out,
            )
        before = weights.input_norm, weights.input_norm_bias
        qkv = self._projected(residual, *before, weights.qkv, weights.qkv_bias)
        if self._config.qk_norm == "projection":
            self._norm_projections(weights, qkv)
        return ops.qk_norm_rope_kv_write(qkv, *norms, eps, *where, scales=scales, out=out)

    def after_attention(self, weights: LayerWeights, attended: Tensor, residual: Tensor) -> None:
        """See `FusedLayer.after_attention`."""
        matrix, bias, rows = weights.output, weights.output_bias, attended.flatten(1)
        if self._config.block == "parallel":  # the MLP reads what attention has read
            before = weights.input_norm, weights.input_norm_bias
            added = linear(self._ops, rows, matrix, bias)
            added += linear(
                self._ops, self._inner(weights, residual, *before), weights.down, weights.down_bias
            )
            residual += added
            return
        self._add(rows, matrix, bias, weights.attended_norm, residual)
        if self._experts is not None and weights.router is not None:
            self._experts.add(weights, residual)
            return
        gate_up, down = weights.gate_up, weights.down
        if (
            self._swiglu
            and isinstance(gate_up, ScaledWeight)
            and isinstance(down, ScaledWeight)
            and self._config.block == "pre"
        ):
            self._ops.norm_quantize_swiglu_add(
                residual, weights.post_norm, self._eps, gate_up, down
            )
            return
        inner = self._inner(weights, residual, weights.post_norm, weights.post_norm_bias)
        self._add(inner, weights.down, weights.down_bias, weights.mlp_norm, residual)

    def head(self, weights: Weights, hidden: Tensor, out: Tensor | None) -> Tensor:
        """See `FusedLayer.head`."""
        ops, cap = self._ops, self._config.logit_soft_cap
        if self._config.norm == "layer":
            normed = ops.layer_norm(hidden, weights.norm, weights.norm_bias, self._eps)
            logits = linear(ops, normed, weights.head, out=out)
        else:
            logits = norm_linear(ops, hidden, weights.norm, self._eps, weights.head, out=out)
        return logits if cap is None else ops.soft_cap(logits, cap)

    def _inner(
        self, weights: LayerWeights, residual: Tensor, norm: Tensor | None, bias: Tensor | None
    ) -> Tensor | QuantizedInput:
        """The MLP of `residual [rows, hidden]` up to its activation: `[rows, intermediate]`.

        `norm` and `bias` are the weight and the bias of the norm before it.
        """
        ops, config = self._ops, self._config
        if self._swiglu and isinstance(weights.gate_up, Tensor):
            return ops.norm_gate_up_silu_mul(residual, norm, self._eps, weights.gate_up)
        inner = self._projected(residual, norm, bias, weights.gate_up, weights.gate_up_bias)
        if self._gated_silu and isinstance(weights.down, ScaledWeight):
            return ops.silu_mul_quantize(inner, weights.down.input_format)
        return ops.activate(inner, config.activation, gated=config.gated)

    def _add(
        self,
        x: Tensor | QuantizedInput,
        matrix: LinearWeight,
        bias: Tensor | None,
        norm: Tensor | None,
        residual: Tensor,
    ) -> None:
        """Adds `x [rows, in_features]` times `matrix`, with `bias`, to `residual [rows, hidden]`.

        With `norm`, the product is normalized before it is added. Changes `residual` in place.
        """
        if norm is None and bias is None and not isinstance(matrix, Tensor):
            linear_add(self._ops, x, matrix, residual)
            return
        added = linear(self._ops, x, matrix, bias)
        residual += added if norm is None else self._ops.rms_norm(added, norm, self._eps)

    def _projected(
        self,
        residual: Tensor,
        norm: Tensor | None,
        norm_bias: Tensor | None,
        matrix: LinearWeight,
        bias: Tensor | None,
    ) -> Tensor:
        """The first projection of attention or MLP: `[rows, out_features]`."""
        if self._config.block == "post":
            return linear(self._ops, residual, matrix, bias)
        if self._config.norm != "layer":  # a norm that is None is folded into the matrix
            return norm_linear(self._ops, residual, norm, self._eps, matrix, bias)
        assert norm is not None
        normed = self._ops.layer_norm(residual, norm, norm_bias, self._eps)
        return linear(self._ops, normed, matrix, bias)

    def _norm_projections(self, weights: LayerWeights, qkv: Tensor) -> None:
        """Normalizes all queries of each token together, and all keys, in place."""
        assert weights.q_norm is not None
        assert weights.k_norm is not None
        query, key = len(weights.q_norm), len(weights.k_norm)
        queries, keys = qkv[:, :query], qkv[:, query : query + key]
        queries.copy_(self._ops.rms_norm(queries, weights.q_norm, self._eps))
        keys.copy_(self._ops.rms_norm(keys, weights.k_norm, self._eps))
