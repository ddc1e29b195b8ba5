"""The MLP of a layer with experts, in the operations of `ExpertOps`."""

from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.config.experts import ExpertsConfig
from pagewire.worker.model.linear import linear
from pagewire.worker.model.weights import LayerWeights
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.experts import ClampedSwiglu, Routing
from pagewire.worker.ops.contract.quantized import QuantizedInput, ScaledWeight


class ExpertMlp:
    """Computes a few experts for each token, and the shared expert if there is one.

    It has an RMSNorm before the experts and none after them, as in all families with experts.
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
        assert weights.post_norm is not None
        normed, routes = self._ops.norm_route(
            residual,
            weights.post_norm,
            self._eps,
            weights.router,
            self._routing,
            weights.correction,
            weights.router_bias,
        )
        self._ops.experts_add(
            normed,
            routes,
            self._routing.experts,
            weights.gate_up,
            weights.down,
            residual,
            weights.gate_up_bias,
            weights.down_bias,
            self._clamp,
            *self._shared(weights, normed),
        )

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
