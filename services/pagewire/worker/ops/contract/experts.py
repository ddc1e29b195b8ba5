"""A mixture of experts: each token goes through a few of many feed-forward layers.

A layer is two operations: `norm_route` normalizes tokens and chooses experts for each, and
`experts_add` computes the experts. They consist of others: `route` chooses experts,
`sort_by_expert` puts the tokens of an expert side by side, `experts_gate_up_silu_mul` and
`experts_down` compute the experts, and `add_experts` sums their results for each token.

A *pair* is a token and one of its experts: pair `token * top_k + i` is the token and its expert i.
A *row* is a pair's place after sorting. The result of a token depends on this token alone: other
tokens change the row of a pair, but not the operations that compute it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from pagewire.worker.ops.contract.quantized import LinearWeight, QuantizedInput


@dataclass(frozen=True, slots=True)
class Routing:
    """How the router's logits determine the experts of a token and their weights.

    `softmax` weighs an expert by its probability among all experts. `sigmoid` weighs each expert by
    itself; a correction added to the weights decides only which experts are chosen (DeepSeek-AI,
    2024, "DeepSeek-V3 Technical Report", section 2.1.2).

    `renormalize` divides the weights by their sum over the chosen experts. With `softmax` this is
    the softmax over the chosen experts only. `scale` multiplies the weights at the end.

    Experts may form `groups` of equal size. A token then chooses among the experts of `top_groups`
    groups: with `sigmoid` those with the largest sums of their two best experts, with `softmax`
    those with the best experts (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.2.2).

    Raises:
        ValueError: the numbers do not fit together.
    """

    experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k {self.top_k} is not in 1 to {self.experts}, the experts")
        if self.groups == 1:
            return
        least = 2 if self.scoring == "sigmoid" else 1
        if self.groups < 1 or self.experts % self.groups or self.experts < least * self.groups:
            raise ValueError(f"{self.experts} experts do not form {self.groups} groups")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups {self.top_groups} is not in 1 to {self.groups}")
        if self.top_k > self.top_groups * (self.experts // self.groups):
            raise ValueError(f"{self.top_groups} groups have fewer than top_k {self.top_k} experts")


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """`gate * sigmoid(alpha * gate) * (up + 1)` instead of `silu(gate) * up`.

    Before that, gates are clamped to at most `limit`, and `up` to the range from `-limit` to
    `limit` (OpenAI, 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.1).
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class PairNumbers:
    """Numbers of pairs among those of their expert, from zero on, in any order."""

    numbers: Tensor  # [tokens, top_k] int32
    counts: Tensor  # [experts] int32, the pairs of each expert


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each token. The largest score comes first; of equal ones, the lower expert."""

    experts: Tensor  # [tokens, top_k] int32, different ones for each token
    weights: Tensor  # [tokens, top_k] float32
    numbered: PairNumbers | None = None  # for sorting; an implementation may leave them out


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The pairs of a batch in the order of their experts; pairs of one expert have any order.

    Tensors are int32 on the device. The host does not have the number of pairs of each expert.
    """

    top_k: int
    pairs: Tensor  # [pairs], the pair of each row
    rows: Tensor  # [pairs], the row of each pair
    starts: Tensor  # [experts + 1], the first row of each expert, then the number of rows
    tile: int  # rows of a tile
    # [2, tiles]: expert and first row of each tile. A tile holds rows of one expert. There are as
    # many tiles as any routes could need. Unused ones are last; their expert is -1 - (used tiles).
    tiles: Tensor


class ExpertOps(Protocol):
    """The operations of a layer with experts: the two that models call, then their parts."""

    def norm_route(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        router: Tensor,
        routing: Routing,
        correction: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Routes]:
        """Return `rms_norm(x)` and the routes of these tokens.

        Args:
            x: `[tokens, hidden]`.
            norm_weight, eps: as in `NormOps.rms_norm`.
            router, routing, correction, bias: as in `route`.
        """

    def experts_add(
        self,
        x: Tensor,
        routes: Routes,
        num_experts: int,
        gate_up: LinearWeight,
        down: LinearWeight,
        residual: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        clamp: ClampedSwiglu | None = None,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        """Add the weighted experts of each token to `residual` in place.

        An implementation may add up the products of few tokens in another order.

        Args:
            x: `[tokens, hidden]`, normalized; quantized here if the weights are scaled.
            routes: the experts of each token and their weights.
            num_experts: the experts of the layer.
            gate_up, down: the weights of all experts, as in `experts_gate_up_silu_mul` and
                `experts_down`.
            residual: `[tokens, hidden]`, contiguous.
            gate_up_bias, down_bias, clamp: as in these two.
            shared, shared_gate: as in `add_experts`.

        Returns:
            `residual`.
        """

    def route(
        self,
        x: Tensor,
        router: Tensor,
        routing: Routing,
        correction: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Routes:
        """Choose the experts of each token.

        Logits are `x @ router.T + bias` in float32. NaNs are chosen last. If all logits of a token
        are NaN, its weights are NaN too, so that a token whose input is not finite can be found.

        Args:
            x: `[tokens, hidden]`, normalized.
            router: `[experts, hidden]`, in the dtype of `x`.
            routing: how experts and weights follow from the logits.
            correction: `[experts]` float32 or None; added to the scores that choose, with `sigmoid`
                only.
            bias: `[experts]` or None, in the dtype of `x`.
        """

    def sort_by_expert(self, experts: Tensor, num_experts: int) -> ExpertRows:
        """Put the pairs of each expert side by side. The host does not wait for the device.

        Args:
            experts: `[tokens, top_k]` int32, each below `num_experts`.
            num_experts: the experts of the layer.
        """

    def experts_gate_up_silu_mul(
        self,
        x: Tensor | QuantizedInput,
        weight: LinearWeight,
        rows: ExpertRows,
        bias: Tensor | None = None,
        clamp: ClampedSwiglu | None = None,
    ) -> Tensor:
        """Return `silu(gate) * up` of each row, `[pairs, intermediate]` in the dtype of `x`.

        An implementation may round gates and values to the dtype before the activation, or not.

        Args:
            x: `[tokens, hidden]`; quantized in its `input_format` if the weight is scaled.
            weight: `[experts, 2 * intermediate, hidden]`: of each expert the rows of its gate
                projection, then those of its up projection. A quantized weight has the rows of
                all experts one below the other; it has no `order`.
            rows: the order of the pairs.
            bias: `[experts, 2 * intermediate]` or None, added before the activation.
            clamp: the activation, if it is not `silu(gate) * up`.
        """

    def experts_down(
        self,
        x: Tensor | QuantizedInput,
        weight: LinearWeight,
        rows: ExpertRows,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return `x @ weight.T + bias` of each row's expert, `[pairs, hidden]`.

        Args:
            x: `[pairs, intermediate]`, by row; quantized if the weight is scaled.
            weight: `[experts, hidden, intermediate]`, or quantized as above.
            rows: the order of the pairs.
            bias: `[experts, hidden]` or None.
        """

    def add_experts(
        self,
        parts: Tensor,
        weights: Tensor,
        rows: ExpertRows,
        residual: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        """Add the weighted sum of each token's experts to `residual` in place.

        The sum starts with the first expert of the token, is computed in float32 and is rounded to
        the dtype before it is added, as in `LinearOps.linear_add`.

        Args:
            parts: `[pairs, hidden]`, by row.
            weights: `[tokens, top_k]` float32.
            rows: the order of the pairs.
            residual: `[tokens, hidden]`, contiguous.
            shared: `[tokens, hidden]` or None, added after the experts.
            shared_gate: `[tokens, 1]` or None; `shared` is multiplied by its sigmoid.

        Returns:
            `residual`.
        """
