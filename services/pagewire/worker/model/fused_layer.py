"""Layers of Llama's form, in fused operations: RMSNorm before attention and MLP, SwiGLU."""

from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.expert_mlp import ExpertMlp
from pagewire.worker.model.weights import LayerWeights, Weights
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.blocks import KVScales


class FusedLayer:
    """Computes the parts of a layer around attention.

    The norms are folded into the matrices, except the norm before experts. No matrix is quantized.
    """

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        self._ops = ops
        self._eps = config.norm_eps
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
        """Writes the KV of a layer and returns its queries `[tokens, heads, head_dim]`.

        `residual [tokens, hidden]` stays unchanged; `keys`, `values` and `scales` are those of the
        layer's cache. The other tensors are as in `RopeOps.qk_norm_rope_kv_write`.
        """
        assert isinstance(weights.qkv, Tensor)
        return self._ops.norm_qkv_rope_kv_write(
            residual,
            self._eps,
            weights.qkv,
            weights.qkv_bias,
            weights.q_norm,
            weights.k_norm,
            cos_sin,
            positions,
            slots,
            block_tables,
            keys,
            values,
            scales=scales,
            out=out,
        )

    def after_attention(self, weights: LayerWeights, attended: Tensor, residual: Tensor) -> None:
        """Adds the output projection and the MLP to `residual [rows, hidden]`, in place.

        `attended [rows, heads, head_dim]` is the result of attention.
        """
        assert isinstance(weights.output, Tensor)
        self._ops.linear_add(attended.flatten(1), weights.output, residual)
        if weights.output_bias is not None:
            residual += weights.output_bias
        self.add_mlp(weights, residual)

    def add_mlp(self, weights: LayerWeights, residual: Tensor) -> None:
        """Adds the MLP to `residual [rows, hidden]`, in place."""
        if self._experts is not None and weights.router is not None:
            self._experts.add(weights, residual)
            return
        assert isinstance(weights.gate_up, Tensor)
        assert isinstance(weights.down, Tensor)
        gated = self._ops.norm_gate_up_silu_mul(residual, None, self._eps, weights.gate_up)
        self._ops.linear_add(gated, weights.down, residual)

    def head(self, weights: Weights, hidden: Tensor, out: Tensor | None) -> Tensor:
        """The logits `[rows, vocab]` of `hidden [rows, hidden]`."""
        assert isinstance(weights.head, Tensor)
        return self._ops.norm_linear(hidden, weights.norm, self._eps, weights.head, out=out)


def is_fused(config: ModelConfig) -> bool:
    """Whether `FusedLayer` computes the layers of a model."""
    return (
        config.norms_folded
        and config.block == "pre"
        and config.qk_norm != "projection"
        and config.gated
        and config.activation == "silu"
        and not config.mlp_bias
        and config.logit_soft_cap is None
        and config.quantization is None
    )
