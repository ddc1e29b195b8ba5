"""The cases of a mixture of experts: each operation of a layer, with experts drawn at random."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagewire.bench.kernels.cases import EPS, Case, copies
from pagewire.bench.kernels.shapes import ExpertShapes, Sizes
from pagewire.worker.ops import load_ops
from pagewire.worker.ops.contract.experts import ExpertRows, Routes, Routing


@dataclass(frozen=True, slots=True)
class ExpertCaseMaker:
    """Makes the cases of a model. Inputs are drawn when a case is made."""

    shapes: ExpertShapes
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    def all(self) -> Iterator[tuple[str, Callable[[], Case]]]:
        """Yield the name of each case and a function that makes it."""
        for count in self.sizes.expert_tokens:
            yield f"norm and routing, tokens: {count}", partial(self.route, count)
            yield f"sort by expert, tokens: {count}", partial(self.sort, count)
            yield f"gate/up of experts + SiLU*mul, tokens: {count}", partial(self.gate_up, count)
            yield f"down of experts, tokens: {count}", partial(self.down, count)
            yield f"sum of experts, tokens: {count}", partial(self.sum, count)
            yield f"experts of a layer, tokens: {count}", partial(self.layer, count)

    def route(self, tokens: int) -> Case:
        shapes, x = self.shapes, self.randn(tokens, self.shapes.hidden)
        routing, norm = Routing(shapes.experts, shapes.top_k), self.randn(shapes.hidden)
        routers = [w * shapes.hidden**-0.5 for w in self._several(shapes.experts, shapes.hidden)]
        work = routers[0].nbytes + 2 * x.nbytes
        inputs = [(x, norm, EPS, router, routing) for router in routers]
        return Case("norm_route", work, "TB/s", inputs)

    def sort(self, tokens: int) -> Case:
        chosen = [self._chosen(tokens) for _ in range(2)]
        inputs = [(experts, self.shapes.experts) for experts in chosen]
        return Case("sort_by_expert", 3 * chosen[0].nbytes, "TB/s", inputs)

    def gate_up(self, tokens: int) -> Case:
        shapes, x = self.shapes, self.randn(tokens, self.shapes.hidden)
        size = (2 * shapes.intermediate, shapes.hidden)
        return self._grouped("experts_gate_up_silu_mul", x, tokens, size)

    def down(self, tokens: int) -> Case:
        shapes = self.shapes
        x = self.randn(tokens * shapes.top_k, shapes.intermediate)
        return self._grouped("experts_down", x, tokens, (shapes.hidden, shapes.intermediate))

    def _grouped(self, op: str, x: Tensor, tokens: int, size: tuple[int, int]) -> Case:
        """Make a case of a GEMM. The weights of experts without rows do not count as work."""
        chosen, rows = self.rows(tokens)
        weights = [w * size[1] ** -0.5 for w in self._several(self.shapes.experts, *size)]
        inputs = [(x, weight, rows) for weight in weights]
        if tokens >= self.sizes.compute_bound_tokens:
            work = 2 * chosen.numel() * size[0] * size[1]
            return Case(op, work, "TFLOP/s", inputs, reference_on_host=True)
        work = chosen.unique().numel() * weights[0][0].nbytes
        return Case(op, work, "TB/s", inputs, reference_on_host=True)

    def sum(self, tokens: int) -> Case:
        chosen, rows = self.rows(tokens)
        weights = torch.rand(chosen.shape, device=self.device)
        residual = self.randn(tokens, self.shapes.hidden)
        parts = self._several(chosen.numel(), self.shapes.hidden)
        work = parts[0].nbytes + 2 * residual.nbytes
        return Case("add_experts", work, "TB/s", [(x, weights, rows, residual) for x in parts])

    def layer(self, tokens: int) -> Case:
        """Make a case of all operations after the router."""
        shapes, x = self.shapes, self.randn(tokens, self.shapes.hidden)
        routes = self.routes(tokens)
        gate_up = (2 * shapes.intermediate, shapes.hidden)
        down = (shapes.hidden, shapes.intermediate)
        sizes = ((shapes.experts, *size) for size in (gate_up, down))
        weights = [[w * w.shape[2] ** -0.5 for w in self._several(*size)] for size in sizes]
        inputs = [
            (x, routes, shapes.experts, gates, downs, torch.randn_like(x))
            for gates, downs in zip(*weights, strict=False)
        ]
        if tokens >= self.sizes.compute_bound_tokens:
            work = 6 * tokens * shapes.top_k * shapes.hidden * shapes.intermediate
            return Case("experts_add", work, "TFLOP/s", inputs, reference_on_host=True)
        used = routes.experts.unique().numel()
        work = used * sum(held[0][0].nbytes for held in weights)
        return Case("experts_add", work, "TB/s", inputs, reference_on_host=True)

    def routes(self, tokens: int) -> Routes:
        """Draw the experts of each token and their weights."""
        shares = torch.rand(tokens, self.shapes.top_k, device=self.device).softmax(1)
        return Routes(self._chosen(tokens), shares)

    def rows(self, tokens: int) -> tuple[Tensor, ExpertRows]:
        """Draw experts and sort them. Only kernels read their tiles; references do not."""
        chosen = self._chosen(tokens)
        return chosen, load_ops("triton").sort_by_expert(chosen, self.shapes.experts)

    def _chosen(self, tokens: int) -> Tensor:
        """Draw different experts for each token, `[tokens, top_k]` int32."""
        scores = torch.rand(tokens, self.shapes.experts, device=self.device)
        return scores.argsort(1)[:, : self.shapes.top_k].int().contiguous()

    def randn(self, *shape: int) -> Tensor:
        """Draw normal values."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _several(self, *shape: int) -> list[Tensor]:
        first = self.randn(*shape)
        count = copies(first.nbytes, self.sizes)
        return [first, *(torch.randn_like(first) for _ in range(1, count))]
