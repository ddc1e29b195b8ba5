"""Linear layers whose weight is quantized, and the quantization of their inputs.

A scaled weight has eight bits an element, and its inputs are quantized to the same type before the
product (W8A8). A grouped weight has four or eight bits an element, and its inputs stay as they are
(W4A16, W8A16).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

# Columns of a run. A byte holds a column of the run's first half and the column in the same place
# of its second half. So a kernel reads a run at once, without an exchange between threads.
RUN = 128
# The numbers of E2M1 by their bits.
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Largest magnitudes of the types that inputs are quantized to.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True, slots=True)
class InputFormat:
    """How the inputs of a layer with a scaled weight are quantized.

    `group` inputs of a token share a scale; None means all inputs. `scale [1]` float32 is static;
    with None the scale is the largest magnitude of the inputs divided by that of `dtype`.
    """

    dtype: torch.dtype
    group: int | None
    scale: Tensor | None


@dataclass(frozen=True, slots=True)
class QuantizedInput:
    """Inputs as `values * scales`, each scale for `group` values of a token."""

    values: Tensor  # [tokens, in_features], int8 or float8_e4m3fn
    scales: Tensor  # [tokens, groups] float32
    dtype: torch.dtype  # of the inputs before quantization, and of the results


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight in eight bits, `values * scales`: FP8 or INT8.

    A scale is for `block` rows and columns: (1, in_features) is one for each channel, (128, 128) is
    the block format of FP8. The last blocks may be smaller.
    """

    values: Tensor  # [out_features, in_features], int8 or float8_e4m3fn
    scales: Tensor  # [blocks of rows, blocks of columns] float32
    block: tuple[int, int]
    input_scale: Tensor | None  # [1] float32, or None for dynamic scales

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features."""
        rows, columns = self.values.shape
        return rows, columns

    @property
    def input_format(self) -> InputFormat:
        """How the inputs of this layer are quantized: in groups where the weight has blocks."""
        group = self.block[1] if self.block[1] < self.shape[1] else None
        return InputFormat(self.values.dtype, group, self.input_scale)

    def rows(self, start: int, stop: int) -> ScaledWeight:
        """A view of the rows `start` to `stop`; `start` begins a block."""
        height = self.block[0]
        assert start % height == 0
        scales = self.scales[start // height : -(-stop // height)]
        return ScaledWeight(self.values[start:stop], scales, self.block, self.input_scale)

    def in_order(self, order: Tensor) -> ScaledWeight:
        """A copy with the rows `order`; each row has its own scales."""
        height, width = self.block
        scales = self.scales.repeat_interleave(height, 0)[order]
        values = self.values.view(torch.uint8)[order].view(self.values.dtype)
        return ScaledWeight(values, scales, (1, width), self.input_scale)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight in four or eight bits, `(values - zeros) * scales`, each scale for `group` columns.

    With four bits, byte `j` of run `r` holds column `RUN * r + j` in its low half and column
    `RUN * r + RUN / 2 + j` in its high half; columns that fill the last run are 0.

    With `order`, column `i` of the weight multiplies input `order[i]` (GPTQ's `desc_act`).

    With `float4`, values are numbers of the type E2M1, and a scale is the exponent of a power of
    two, with 127 added (MXFP4; Open Compute Project, 2023, "OCP Microscaling Formats").

    With `pairs` the weight is arranged: the bytes have another order, and rows are padded (see
    `triton.quantized.fragments`).
    """

    values: Tensor  # [out_features, runs * RUN / 2] or [out_features, in_features], uint8
    scales: Tensor  # [out_features, groups], a floating-point type; uint8 with `float4`
    zeros: Tensor | None  # [out_features, groups] uint8; None is `2 ** (bits - 1)`
    order: Tensor | None  # [in_features] int32
    bits: int
    group: int
    columns: int
    float4: bool = False
    pairs: Tensor | None = None  # [blocks, groups, lines, 8] int32, scales with zero points

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features."""
        return int(self.scales.shape[0]), self.columns

    def rows(self, start: int, stop: int) -> GroupedWeight:
        """A view of the rows `start` to `stop`."""
        assert self.pairs is None
        return GroupedWeight(
            self.values[start:stop],
            self.scales[start:stop],
            None if self.zeros is None else self.zeros[start:stop],
            self.order,
            self.bits,
            self.group,
            self.columns,
            self.float4,
        )

    def in_order(self, order: Tensor) -> GroupedWeight:
        """A copy with the rows `order`."""
        assert self.pairs is None
        return GroupedWeight(
            self.values[order],
            self.scales[order],
            None if self.zeros is None else self.zeros[order],
            self.order,
            self.bits,
            self.group,
            self.columns,
            self.float4,
        )


QuantizedWeight = ScaledWeight | GroupedWeight
LinearWeight = Tensor | ScaledWeight | GroupedWeight


def tensors_of(weight: LinearWeight) -> list[Tensor]:
    """All tensors of a weight of either kind."""
    if isinstance(weight, Tensor):
        return [weight]
    values = (getattr(weight, field.name) for field in fields(weight))
    return [value for value in values if isinstance(value, Tensor)]


class QuantizedOps(Protocol):
    """Quantization of inputs, and products with quantized weights."""

    def quantize(self, x: Tensor, inputs: InputFormat) -> QuantizedInput:
        """Return `x` in eight bits.

        Values are divided by their scale, limited to the type's range and rounded to the nearest,
        half to even. A group of zeros has the scale 1.

        Args:
            x: `[tokens, in_features]`.
            inputs: the type and the scales.
        """

    def norm_quantize(
        self, x: Tensor, norm_weight: Tensor | None, eps: float, inputs: InputFormat
    ) -> QuantizedInput:
        """Return `quantize(rms_norm(x, norm_weight, eps), inputs)`."""

    def silu_mul_quantize(self, gate_up: Tensor, inputs: InputFormat) -> QuantizedInput:
        """Return `quantize(silu_mul(gate_up), inputs)`."""

    def scaled_linear(
        self,
        x: QuantizedInput,
        weight: ScaledWeight,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `x @ weight.T + bias`.

        Products of FP8 are added up in float32, in sums of at most 128 products, because the tensor
        cores of Hopper keep fewer bits. Products of INT8 are added up exactly. The order of the
        sums may depend on the number of tokens, unless the worker runs with `--batch-invariant`.

        Args:
            x: `[tokens, in_features]`, quantized in the weight's `input_format`.
            weight: `[out_features, in_features]`.
            bias: `[out_features]` or None.
            out: `[tokens, out_features]` to write to, or None for a new tensor.

        Returns:
            `[tokens, out_features]` in `x.dtype`.
        """

    def scaled_linear_add(
        self, x: QuantizedInput, weight: ScaledWeight, residual: Tensor
    ) -> Tensor:
        """Add `scaled_linear(x, weight)` to `residual [tokens, out_features]` in place; return it.

        The product is rounded to the dtype before the sum is.
        """

    def arranged(self, weight: GroupedWeight) -> GroupedWeight:
        """Return `weight` in the layout that the kernels of its device read fastest.

        The bytes of `weight` may change, so it must not be used afterwards.
        """

    def norm_quantize_linear(
        self,
        x: Tensor,
        norm_weight: Tensor | None,
        eps: float,
        weight: ScaledWeight,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `scaled_linear(norm_quantize(x, ...), weight, bias, out)`."""

    def quantize_linear_add(self, x: Tensor, weight: ScaledWeight, residual: Tensor) -> Tensor:
        """Return `scaled_linear_add(quantize(x), weight, residual)`."""

    def norm_quantize_swiglu_add(
        self,
        residual: Tensor,
        norm_weight: Tensor | None,
        eps: float,
        gate_up: ScaledWeight,
        down: ScaledWeight,
    ) -> Tensor:
        """Add a gated MLP of `residual [tokens, hidden]` to it in place; return it.

        The inner values are `silu_mul(norm_quantize_linear(residual, ..., gate_up))`. Their product
        with `down` is added as by `quantize_linear_add`.

        Args:
            gate_up: `[2 * intermediate, hidden]`, the gates first.
            down: `[hidden, intermediate]`.
        """

    def grouped_linear(
        self,
        x: Tensor,
        weight: GroupedWeight,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `x @ weight.T + bias`, with the weight first rounded to the dtype of `x`.

        A single token may be multiplied by weights that are not rounded. The order of the sums may
        depend on the number of tokens.

        Args:
            x: `[tokens, in_features]`.
            weight: `[out_features, in_features]`.
            bias: `[out_features]` or None.
            out: `[tokens, out_features]` to write to, or None for a new tensor.

        Returns:
            `[tokens, out_features]` in the dtype of `x`.
        """

    def grouped_linear_add(self, x: Tensor, weight: GroupedWeight, residual: Tensor) -> Tensor:
        """Add `grouped_linear(x, weight)` to `residual [tokens, out_features]`; return it.

        The product is rounded to the dtype before the sum is.
        """
