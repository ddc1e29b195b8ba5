"""The cases of latent attention: each operation of a layer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagewire.bench.kernels.cases import EPS, Case, copies
from pagewire.bench.kernels.inputs import Heads, Paged, paged, prefill_starts, rope_inputs
from pagewire.bench.kernels.shapes import LatentShapes, Sizes


@dataclass(frozen=True, slots=True)
class LatentCaseMaker:
    """Makes the cases of a model. Inputs are drawn when a case is made."""

    shapes: LatentShapes
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    def all(self) -> Iterator[tuple[str, Callable[[], Case]]]:
        """Yield the name of each case and a function that makes it."""
        tokens = self.sizes.tokens
        yield f"RoPE + latent norm + write, {tokens} tokens", self.write
        for count in (self.sizes.sampled_rows, tokens):
            yield f"queries of heads absorbed, tokens: {count}", partial(self.absorb, count)
        for rows, length in self.sizes.decode:
            yield f"latent decode attention, {rows} x {length}", partial(self.decode, rows, length)
        for chunks, length in self.sizes.prefill:
            name = f"latent prefill attention, {chunks} x {length}"
            yield name, partial(self.prefill, chunks, length)

    def write(self) -> Case:
        shapes, tokens = self.shapes, self.sizes.tokens
        drawn = rope_inputs(Heads(1, 1, shapes.rotated, self.dtype), tokens, self.device)
        norm = self._randn(shapes.rank)
        given = (norm, EPS, drawn.cos_sin, drawn.positions, drawn.slots, drawn.tables)
        blocks, _, block_size, _ = drawn.shape
        width = shapes.rank + shapes.rotated
        inputs = []
        for q in self._several(tokens, shapes.heads, shapes.plain + shapes.rotated):
            cache = self._randn(blocks, 1, block_size, width)
            inputs.append((q, self._randn(tokens, width), *given, cache))
        work = 2 * (inputs[0][0].nbytes + inputs[0][1].nbytes)
        return Case("latent_rope_kv_write", work, "TB/s", inputs)

    def absorb(self, tokens: int) -> Case:
        shapes, weights = self.shapes, self._several(*self._matrix)
        x = self._randn(tokens, shapes.heads, shapes.plain)
        inputs = [(x, weight) for weight in weights]
        if tokens >= self.sizes.compute_bound_tokens:
            work = 2 * tokens * shapes.heads * shapes.plain * shapes.rank
            return Case("multiply_heads", work, "TFLOP/s", inputs)
        work = weights[0].nbytes + x.nbytes * (shapes.plain + shapes.rank) // shapes.plain
        return Case("multiply_heads", work, "TB/s", inputs)

    @property
    def _matrix(self) -> tuple[int, int, int]:
        return self.shapes.heads, self.shapes.plain, self.shapes.rank

    def decode(self, rows: int, length: int) -> Case:
        width = self.shapes.rank + self.shapes.rotated
        read = rows * length * width * self.dtype.itemsize
        cache = self._paged([length] * rows, copies(read, self.sizes))
        queries = self._queries(rows)
        given = (cache.tables, cache.slots, cache.lengths, self._scale)
        inputs = [(*queries, vectors, *given) for vectors, _ in cache.caches]
        work = read + 2 * queries[0].nbytes
        return Case("latent_decode_attention", work, "TB/s", inputs, reference_on_host=True)

    def prefill(self, chunks: int, length: int) -> Case:
        """Make a causal case without a cached prefix."""
        shapes, lengths = self.shapes, [length] * chunks
        cache, queries = self._paged(lengths, 2), self._queries(chunks * length)
        starts = prefill_starts(lengths, self.device)
        given = (cache.tables, cache.slots, starts, cache.lengths, self._scale, length)
        inputs = [(*queries, vectors, *given) for vectors, _ in cache.caches]
        scores = chunks * length * (length + 1) // 2 * shapes.heads
        work = 2 * scores * (2 * shapes.rank + shapes.rotated)
        return Case("latent_prefill_attention", work, "TFLOP/s", inputs, reference_on_host=True)

    @property
    def _scale(self) -> float:
        return float((self.shapes.plain + self.shapes.rotated) ** -0.5)

    def _paged(self, lengths: list[int], count: int) -> Paged:
        """Draw caches of one head; the keys of each cache are latent vectors and rotated keys."""
        width = self.shapes.rank + self.shapes.rotated
        return paged(lengths, Heads(1, 1, width, self.dtype), self.device, count)

    def _queries(self, tokens: int) -> tuple[Tensor, Tensor]:
        shapes = self.shapes
        queries = self._randn(tokens, shapes.heads, shapes.plain + shapes.rotated)
        return self._randn(tokens, shapes.heads, shapes.rank), queries[..., shapes.plain :]

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _several(self, *shape: int) -> list[Tensor]:
        first = self._randn(*shape)
        return [
            first,
            *(torch.randn_like(first) for _ in range(1, copies(first.nbytes, self.sizes))),
        ]
