"""The MLP of a layer with experts, in the operations of `ExpertOps`."""

from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.config.experts import ExpertsConfig
from pagewire.worker.model.linear import linear
from pagewire.worker.model.weights import LayerWeights
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.experts import ClampedSwiglu, Routing
from pagewire.worker.ops.contract.quantized import LinearWeight, QuantizedInput, ScaledWeight


class ExpertMlp:
    """Sends each token through a few experts, and through the shared one if there is one.

    Before it stands an RMSNorm, behind it nothing: no family with experts has another form.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, ops: Ops) -> None:
        self._ops = ops
        self._eps = config.norm_eps
        self._routing = Routing(
            experts.count,
            experts.top_k,
            scoring=experts.scoring,
            renormalize=experts.renormalize,
            scale=experts.scale,
            groups=experts.groups,
            top_groups=experts.top_groups,
        )
        self._clamp = None if experts.clamp is None else ClampedSwiglu(*experts.clamp)

    def add(self, weights: LayerWeights, residual: Tensor) -> None:
        """Adds the weighted experts of each token to `residual [rows, hidden]`, in place."""
        assert weights.router is not None
        ops = self._ops
        normed = ops.rms_norm(residual, weights.post_norm, self._eps)
        routes = ops.route(
            normed, weights.router, self._routing, weights.correction, weights.router_bias
        )
        rows = ops.sort_by_expert(routes.experts, self._routing.experts)
        gated = ops.experts_gate_up_silu_mul(
            self._input(normed, weights.gate_up),
            weights.gate_up,
            rows,
            weights.gate_up_bias,
            self._clamp,
        )
        parts = ops.experts_down(
            self._input(gated, weights.down), weights.down, rows, weights.down_bias
        )
        shared, gate = self._shared(weights, normed)
        ops.add_experts(parts, routes.weights, rows, residual, shared, gate)

    def _shared(self, weights: LayerWeights, normed: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The shared expert's output `[rows, hidden]` and the logit of its gate `[rows, 1]`."""
        if weights.shared_gate_up is None or weights.shared_down is None:
            return None, None
        ops = self._ops
        both, down = linear(ops, normed, weights.shared_gate_up), weights.shared_down
        inner: Tensor | QuantizedInput
        if isinstance(down, ScaledWeight):
            inner = ops.silu_mul_quantize(both, down.input_format)
        else:
            inner = ops.silu_mul(both)
        gate = None
        if weights.shared_gate is not None:
            gate = ops.linear(normed, weights.shared_gate)
        return linear(ops, inner, down), gate

    def _input(self, x: Tensor, weight: LinearWeight) -> Tensor | QuantizedInput:
        """The input of a product with `weight`, quantized where it must be."""
        return self._ops.quantize(x, weight.input_format) if isinstance(weight, ScaledWeight) else x
