"""Layers of every form that a family can declare, fused where operations for that exist."""

from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.expert_mlp import ExpertMlp
from pagewire.worker.model.weights import LayerWeights, Weights
from pagewire.worker.ops import Ops


class GeneralLayer:
    """What a layer computes around attention; see `FusedLayer` for the methods."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        self._config = config
        self._ops = ops
        self._eps = config.norm_eps
        self._swiglu = (
            config.norm != "layer"
            and config.block in ("pre", "sandwich")
            and config.gated
            and config.activation == "silu"
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
        out: Tensor | None,
    ) -> Tensor:
        """See `FusedLayer.queries`."""
        where = (cos_sin, positions, slots, block_tables, keys, values)
        ops, eps, per_head = self._ops, self._eps, self._config.qk_norm == "head"
        norms = (weights.q_norm, weights.k_norm) if per_head else (None, None)
        if self._config.norms_folded and self._config.qk_norm != "projection":
            return ops.norm_qkv_rope_kv_write(
                residual, eps, weights.qkv, weights.qkv_bias, *norms, *where, out=out
            )
        before = weights.input_norm, weights.input_norm_bias
        qkv = self._projected(residual, *before, weights.qkv, weights.qkv_bias)
        if self._config.qk_norm == "projection":
            self._norm_projections(weights, qkv)
        return ops.qk_norm_rope_kv_write(qkv, *norms, eps, *where, out=out)

    def after_attention(self, weights: LayerWeights, attended: Tensor, residual: Tensor) -> None:
        """See `FusedLayer.after_attention`."""
        added = self._ops.linear(attended.flatten(1), weights.output, weights.output_bias)
        if self._config.block == "parallel":  # the MLP reads what attention has read
            added += self.mlp(weights, residual, weights.input_norm, weights.input_norm_bias)
            residual += added
            return
        residual += self._behind(added, weights.attended_norm)
        if self._experts is not None and weights.router is not None:
            self._experts.add(weights, residual)
            return
        added = self.mlp(weights, residual, weights.post_norm, weights.post_norm_bias)
        residual += self._behind(added, weights.mlp_norm)

    def mlp(
        self, weights: LayerWeights, residual: Tensor, norm: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The MLP of `residual [rows, hidden]` behind the norm before it: `[rows, hidden]`."""
        if self._swiglu:
            inner = self._ops.norm_gate_up_silu_mul(residual, norm, self._eps, weights.gate_up)
        else:
            inner = self._projected(residual, norm, bias, weights.gate_up, weights.gate_up_bias)
            inner = self._ops.activate(inner, self._config.activation, gated=self._config.gated)
        return self._ops.linear(inner, weights.down, weights.down_bias)

    def head(self, weights: Weights, hidden: Tensor, out: Tensor | None) -> Tensor:
        """See `FusedLayer.head`."""
        ops, cap = self._ops, self._config.logit_soft_cap
        if self._config.norm == "layer":
            normed = ops.layer_norm(hidden, weights.norm, weights.norm_bias, self._eps)
            logits = ops.linear(normed, weights.head, out=out)
        else:
            logits = ops.norm_linear(hidden, weights.norm, self._eps, weights.head, out=out)
        return logits if cap is None else ops.soft_cap(logits, cap)

    def _projected(
        self,
        residual: Tensor,
        norm: Tensor | None,
        norm_bias: Tensor | None,
        matrix: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """The first projection of attention or MLP: `[rows, out_features]`."""
        if self._config.block == "post":
            return self._ops.linear(residual, matrix, bias)
        if self._config.norm != "layer":  # a norm that is None is folded into the matrix
            return self._ops.norm_linear(residual, norm, self._eps, matrix, bias)
        assert norm is not None
        normed = self._ops.layer_norm(residual, norm, norm_bias, self._eps)
        return self._ops.linear(normed, matrix, bias)

    def _behind(self, added: Tensor, weight: Tensor | None) -> Tensor:
        """What is added to the residual stream."""
        return added if weight is None else self._ops.rms_norm(added, weight, self._eps)

    def _norm_projections(self, weights: LayerWeights, qkv: Tensor) -> None:
        """Normalizes all queries of each token together, and all keys, in place."""
        assert weights.q_norm is not None
        assert weights.k_norm is not None
        query, key = len(weights.q_norm), len(weights.k_norm)
        queries, keys = qkv[:, :query], qkv[:, query : query + key]
        queries.copy_(self._ops.rms_norm(queries, weights.q_norm, self._eps))
        keys.copy_(self._ops.rms_norm(keys, weights.k_norm, self._eps))
