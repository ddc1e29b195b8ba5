"""The cases of quantized weights: matrix products, and the quantization of their inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagewire.bench.kernels.cases import EPS, Case
from pagewire.bench.kernels.shapes import Shapes, Sizes
from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.model.quantization.scheme import Fp8Scheme, GroupedScheme, Int8Scheme, Scheme
from pagewire.worker.ops import load_ops
from pagewire.worker.ops.contract.quantized import (
    InputFormat,
    QuantizedWeight,
    ScaledWeight,
    tensors_of,
)
from pagewire.worker.ops.reference.quantized import quantize

GROUP = 128  # inputs of a scale with four bits
FORMATS: dict[str, Scheme] = {
    "FP8": Fp8Scheme(),
    "FP8 in blocks": Fp8Scheme(block=(128, 128)),
    "INT8": Int8Scheme(),
    "4 bits": GroupedScheme(bits=4, group=GROUP, symmetric=True),
    "4 bits with zeros": GroupedScheme(bits=4, group=GROUP, symmetric=False),
}
FP8_INPUTS = InputFormat(torch.float8_e4m3fn, None, None)


@dataclass(frozen=True, slots=True)
class QuantizedCases:
    """Makes the cases of a model. Inputs are drawn when a case is made."""

    shapes: Shapes
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    def all(self) -> Iterator[tuple[str, Callable[[], Case]]]:
        """Yield the name of each case and a function that makes it."""
        tokens = self.sizes.tokens
        yield f"RMSNorm + FP8, {tokens} tokens", self.norm
        yield f"SiLU*mul + FP8, {tokens} tokens", self.activation
        for name in FORMATS:
            for count in (*self.sizes.linear_tokens, tokens):
                yield f"gate/up in {name}, tokens: {count}", partial(self.product, name, count)

    def norm(self) -> Case:
        tokens, hidden = self.sizes.tokens, self.shapes.hidden
        weight = self._randn(hidden)
        inputs = [(x, weight, EPS, FP8_INPUTS) for x in self._several(tokens, hidden)]
        written = tokens * hidden
        return Case("norm_quantize", inputs[0][0].nbytes + written, "TB/s", inputs)

    def activation(self) -> Case:
        tokens, width = self.sizes.tokens, self.shapes.intermediate
        inputs = [(x, FP8_INPUTS) for x in self._several(tokens, 2 * width)]
        written = tokens * width
        return Case("silu_mul_quantize", inputs[0][0].nbytes + written, "TB/s", inputs)

    def product(self, name: str, tokens: int) -> Case:
        """Make a case: for few tokens the weight counts as work, for many the operations do."""
        hidden, rows = self.shapes.hidden, 2 * self.shapes.intermediate
        first = self._weight(name)
        size = sum(tensor.nbytes for tensor in tensors_of(first))
        copies = max(2, min(64, -(-self.sizes.rotated_bytes // size)))
        weights = [first, *(self._weight(name) for _ in range(1, copies))]
        x: Any = self._randn(tokens, hidden)
        op = "grouped_linear"
        if isinstance(first, ScaledWeight):
            op, x = "scaled_linear", quantize(x, first.input_format)
        inputs = [(x, weight) for weight in weights]
        if tokens == self.sizes.tokens:
            return Case(op, 2 * tokens * hidden * rows, "TFLOP/s", inputs)
        return Case(op, size, "TB/s", inputs)

    def _weight(self, name: str) -> QuantizedWeight:
        hidden, rows = self.shapes.hidden, 2 * self.shapes.intermediate
        plain = self._randn(rows, hidden) * hidden**-0.5
        weight = quantize_weight(plain, FORMATS[name], self.dtype)
        return weight if isinstance(weight, ScaledWeight) else load_ops("triton").arranged(weight)

    def _several(self, *shape: int) -> list[Tensor]:
        first = self._randn(*shape)
        copies = max(2, min(64, -(-self.sizes.rotated_bytes // first.nbytes)))
        return [first, *(torch.randn_like(first) for _ in range(1, copies))]

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)
