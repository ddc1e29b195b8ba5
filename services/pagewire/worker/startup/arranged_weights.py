"""Weights in the arrangement that the kernels of their device read fastest."""

from dataclasses import fields, replace
from typing import Any

from pagewire.worker.model.weights import LayerWeights, Weights
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.quantized import GroupedWeight


def arranged_weights(weights: Weights, ops: Ops) -> Weights:
    """The same weights for the kernels of `ops`. Do not use the argument `weights` afterwards.

    Matrices of experts stay as they are.
    """

    def arranged(layer: LayerWeights) -> LayerWeights:
        of_experts = set() if layer.router is None else {"gate_up", "down"}
        changed: dict[str, Any] = {
            field.name: ops.arranged(value)
            for field in fields(layer)
            if isinstance(value := getattr(layer, field.name), GroupedWeight)
            and field.name not in of_experts
        }
        return replace(layer, **changed)

    head = weights.head
    return replace(
        weights,
        layers=tuple(arranged(layer) for layer in weights.layers),
        head=ops.arranged(head) if isinstance(head, GroupedWeight) else head,
    )
