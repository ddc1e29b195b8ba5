"""The cases of quantized experts, drawn at random: both products of a layer, and a whole layer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagewire.bench.kernels.cases import Case, copies
from pagewire.bench.kernels.expert_cases import ExpertCaseMaker
from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.model.quantization.scheme import Fp8Scheme, GroupedScheme, Int8Scheme, Scheme
from pagewire.worker.ops.contract.quantized import QuantizedWeight, ScaledWeight, tensors_of
from pagewire.worker.ops.reference.quantized import quantize

FORMATS: dict[str, Scheme] = {
    "FP8": Fp8Scheme(),
    "FP8 in blocks": Fp8Scheme(block=(128, 128)),
    "INT8": Int8Scheme(),
    "4 bits": GroupedScheme(bits=4, group=128, symmetric=True),
    "MXFP4": GroupedScheme(bits=4, group=32, symmetric=True, float4=True),
}


@dataclass(frozen=True, slots=True)
class QuantizedExpertCases:
    """Makes the cases of a model; `plain` makes those of its plain experts."""

    plain: ExpertCaseMaker

    def all(self) -> Iterator[tuple[str, Callable[[], Case]]]:
        """Yield the name of each case and a function that makes it."""
        shapes = self.plain.shapes
        for name, scheme in FORMATS.items():
            if isinstance(scheme, Fp8Scheme) and scheme.block and shapes.intermediate % 128:
                continue  # blocks would cross projections
            for count in self.plain.sizes.expert_tokens:
                yield (
                    f"gate/up of experts in {name}, tokens: {count}",
                    partial(self._product, scheme, count, True),
                )
                yield (
                    f"down of experts in {name}, tokens: {count}",
                    partial(self._product, scheme, count, False),
                )
                yield (
                    f"experts of a layer in {name}, tokens: {count}",
                    partial(self._layer, scheme, count),
                )

    def _product(self, scheme: Scheme, tokens: int, gated: bool) -> Case:
        """Make a case of a GEMM. The weights of experts without rows do not count as work."""
        shapes, sizes = self.plain.shapes, self.plain.sizes
        size = (shapes.hidden, shapes.intermediate)
        rows, columns = (2 * size[1], size[0]) if gated else size
        first = self._weight(scheme, rows, columns)
        nbytes = sum(tensor.nbytes for tensor in tensors_of(first))
        more = copies(nbytes, sizes) - 1
        weights = [first, *(self._weight(scheme, rows, columns) for _ in range(more))]
        x: Any = self.plain.randn(tokens * (1 if gated else shapes.top_k), columns)
        if isinstance(first, ScaledWeight):
            x = quantize(x, first.input_format)
        chosen, sorted_rows = self.plain.rows(tokens)
        inputs = [(x, weight, sorted_rows) for weight in weights]
        op = "experts_gate_up_silu_mul" if gated else "experts_down"
        if tokens >= sizes.compute_bound_tokens:
            work = 2 * chosen.numel() * rows * columns
            return Case(op, work, "TFLOP/s", inputs, reference_on_host=True)
        work = chosen.unique().numel() * nbytes // shapes.experts
        return Case(op, work, "TB/s", inputs, reference_on_host=True)

    def _layer(self, scheme: Scheme, tokens: int) -> Case:
        """Make a case of all operations after the router, including the quantization of inputs."""
        shapes, sizes = self.plain.shapes, self.plain.sizes
        x, routes = self.plain.randn(tokens, shapes.hidden), self.plain.routes(tokens)
        first = self._weights(scheme)
        nbytes = sum(tensor.nbytes for weight in first for tensor in tensors_of(weight))
        more = copies(nbytes, sizes) - 1
        inputs = [
            (x, routes, shapes.experts, *weights, self.plain.randn(tokens, shapes.hidden))
            for weights in (first, *(self._weights(scheme) for _ in range(more)))
        ]
        if tokens >= sizes.compute_bound_tokens:
            work = 6 * tokens * shapes.top_k * shapes.hidden * shapes.intermediate
            return Case("experts_add", work, "TFLOP/s", inputs, reference_on_host=True)
        work = routes.experts.unique().numel() * nbytes // shapes.experts
        return Case("experts_add", work, "TB/s", inputs, reference_on_host=True)

    def _weights(self, scheme: Scheme) -> tuple[QuantizedWeight, QuantizedWeight]:
        """Make the weights of both products."""
        hidden, intermediate = self.plain.shapes.hidden, self.plain.shapes.intermediate
        gate_up = self._weight(scheme, 2 * intermediate, hidden)
        return gate_up, self._weight(scheme, hidden, intermediate)

    def _weight(self, scheme: Scheme, rows: int, columns: int) -> QuantizedWeight:
        plain = self.plain.randn(self.plain.shapes.experts * rows, columns) * columns**-0.5
        return quantize_weight(plain, scheme, self.plain.dtype)
