"""Quantized weights of layers with the same input, stacked as one matrix, and their parts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.quantization.scheme import Fp8Scheme, GroupedScheme, Int8Scheme, Scheme
from pagewire.worker.model.quantization.stored import StoredLayer
from pagewire.worker.ops.contract.quantized import (
    RUN,
    GroupedWeight,
    QuantizedWeight,
    ScaledWeight,
)


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """The rows from `start` of a stacked weight that belong to one layer of the checkpoint."""

    stored: StoredLayer
    whole: QuantizedWeight
    start: int

    @property
    def view(self) -> QuantizedWeight:
        """The rows of this layer alone."""
        return self.whole.rows(self.start, self.start + self.stored.rows)

    def set_input_scale(self, scale: float) -> None:
        """Sets the static scale of inputs, if there is one."""
        if isinstance(self.whole, ScaledWeight) and self.whole.input_scale is not None:
            self.whole.input_scale.fill_(scale)

    def fill(self, weight: QuantizedWeight) -> None:
        """Copies the layer's own weight into the stacked one.

        The static scale of inputs becomes the largest of all parts. SetupError if the parts order
        their inputs differently.
        """
        view = self.view
        if isinstance(view, ScaledWeight) and isinstance(weight, ScaledWeight):
            _fill_scaled(view, weight)
        else:
            assert isinstance(view, GroupedWeight)
            assert isinstance(weight, GroupedWeight)
            _fill_grouped(view, weight)


def empty_stacked(
    scheme: Scheme, rows: Sequence[int], columns: int, dtype: torch.dtype, device: torch.device
) -> QuantizedWeight:
    """A weight with undefined values for layers with these `rows`, one above the other.

    `dtype` is the type of the scales of a grouped weight.
    """
    total = sum(rows)
    if isinstance(scheme, GroupedScheme):
        return _empty_grouped(scheme, total, columns, dtype, device)
    kind = torch.float8_e4m3fn if isinstance(scheme, Fp8Scheme) else torch.int8
    block = _block(scheme, rows, columns)
    blocks = (-(-total // block[0]), -(-columns // block[1]))
    return ScaledWeight(
        values=torch.empty(total, columns, dtype=kind, device=device),
        scales=torch.empty(blocks, dtype=torch.float32, device=device),
        block=block,
        input_scale=torch.zeros(1, device=device) if scheme.static else None,
    )


def _block(scheme: Fp8Scheme | Int8Scheme, rows: Sequence[int], columns: int) -> tuple[int, int]:
    """Rows and columns of a scale. Blocks that would cross layers are cut into single rows."""
    block = scheme.block if isinstance(scheme, Fp8Scheme) else None
    if block is None:
        return 1, columns
    height, width = block
    crossing = any(count % height for count in rows[:-1])
    return (1 if crossing else height), width


def _empty_grouped(
    scheme: GroupedScheme, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> GroupedWeight:
    group = scheme.group or columns
    groups = -(-columns // group)
    width = columns if scheme.bits == 8 else -(-columns // RUN) * RUN // 2

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=device)

    # Zeros are not an order, but valid indices: kernels are collected before weights are read.
    order = torch.zeros(columns, dtype=torch.int32, device=device)
    return GroupedWeight(
        values=integers(rows, width),
        scales=torch.empty(
            rows, groups, dtype=torch.uint8 if scheme.float4 else dtype, device=device
        ),
        zeros=None if scheme.symmetric else integers(rows, groups),
        order=order if scheme.ordered else None,
        bits=scheme.bits,
        group=group,
        columns=columns,
        float4=scheme.float4,
    )


def _fill_scaled(view: ScaledWeight, weight: ScaledWeight) -> None:
    view.values.copy_(weight.values)
    scales = weight.scales
    if view.block[0] < weight.block[0]:
        scales = scales.repeat_interleave(weight.block[0], 0)[: view.shape[0]]
    view.scales.copy_(scales)
    if view.input_scale is not None and weight.input_scale is not None:
        torch.maximum(view.input_scale, weight.input_scale, out=view.input_scale)


def _fill_grouped(view: GroupedWeight, weight: GroupedWeight) -> None:
    view.values.copy_(weight.values)
    view.scales.copy_(weight.scales)
    if view.zeros is not None and weight.zeros is not None:
        view.zeros.copy_(weight.zeros)
    if view.order is None or weight.order is None:
        return
    if view.order.any() and not torch.equal(view.order, weight.order):
        raise SetupError("g_idx differs from that of the layers with the same input")
    view.order.copy_(weight.order)
