"""The cases: each operation at a shape, with the bytes or operations that bound its time."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from pagewire.bench.kernels.inputs import (
    Heads,
    Paged,
    paged,
    paged_with_shared_prefix,
    penalties_and_biases,
    prefill_starts,
    rope_inputs,
    sampling_state,
)
from pagewire.bench.kernels.shapes import Shapes, Sizes
from pagewire.worker.ops import Name, Ops, load_ops

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Case:
    """Calls of one operation that differ only in their inputs."""

    op: str  # a method of Ops
    work: int  # minimum of bytes moved or floating-point operations in a call
    unit: Literal["TB/s", "TFLOP/s"]
    inputs: list[tuple[Any, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    # The reference in plain torch reads inputs on the host, so it cannot be captured or compiled.
    reference_on_host: bool = False

    def calls(self, ops: Ops) -> list[Callable[[], Any]]:
        """Return a call for each of the inputs."""
        function = getattr(ops, self.op)
        return [partial(function, *given, **self.options) for given in self.inputs]


@dataclass(frozen=True, slots=True)
class CaseMaker:
    """Makes the cases of a model. Inputs are drawn when a case is made."""

    shapes: Shapes
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    ops: Name = "triton"  # the operations to time

    def all(self) -> Iterator[tuple[str, Callable[[], Case]]]:
        """Yield the name of each case and a function that makes it.

        With the operations of `--batch-invariant`, leaves out the cases that they do not support.
        """
        any_form = self.ops != "invariant"
        sizes, tokens = self.sizes, self.sizes.tokens
        yield f"RMSNorm, {tokens} tokens", self.rms_norm
        if any_form:
            yield f"LayerNorm, {tokens} tokens", self.layer_norm
        rope = "QK-norm + RoPE + KV write" if self.shapes.qk_norm else "RoPE + KV write"
        yield f"{rope}, {tokens} tokens", self.rope
        yield f"SiLU*mul, {tokens} tokens", self.silu_mul
        if any_form:
            yield f"GELU*mul, {tokens} tokens", self.gelu_mul
            yield f"soft cap, {sizes.sampled_rows} x {self.shapes.vocabulary}", self.soft_cap
        for rows, length in sizes.decode:
            yield f"decode attention, {rows} x {length}", partial(self.decode, rows, length)
        rows, length = sizes.decode[0]
        name = f"{rows} x {length}, window {length // 4}, soft cap"
        if any_form:
            yield f"decode attention, {name}", partial(self.decode, rows, length, windowed=True)
        shared = sizes.shared_prefix
        name = f"{shared.rows} rows in {shared.groups} groups of {shared.shared}, {shared.own} own"
        yield f"decode attention, {name}", self.decode_shared
        for chunks, length in sizes.prefill:
            yield f"prefill attention, {chunks} x {length}", partial(self.prefill, chunks, length)
        chunks, length = sizes.prefill[-1]
        name = f"{chunks} x {length}, window {length // 4}, soft cap"
        if any_form:
            yield f"prefill attention, {name}", partial(self.prefill, chunks, length, windowed=True)
        logits = f"{sizes.sampled_rows} x {self.shapes.vocabulary}"
        yield f"sampling, {logits}", self.sample
        yield f"sampling, top-k and top-p, {logits}", partial(self.sample, filtered=True)
        yield f"sampling, penalties and biases, {logits}", partial(self.sample, adjusted=True)
        for count in sizes.linear_tokens:
            yield f"norm + gate/up + SiLU*mul, tokens: {count}", partial(self.linear, count)

    def rms_norm(self) -> Case:
        weight, rows = self._randn(self.shapes.hidden), (self.sizes.tokens, self.shapes.hidden)
        inputs = [(x, weight, EPS) for x in self._several(*rows)]
        return Case("rms_norm", 2 * inputs[0][0].nbytes, "TB/s", inputs)

    def layer_norm(self) -> Case:
        weight, rows = self._randn(self.shapes.hidden), (self.sizes.tokens, self.shapes.hidden)
        inputs = [(x, weight, weight, EPS) for x in self._several(*rows)]
        return Case("layer_norm", 2 * inputs[0][0].nbytes, "TB/s", inputs)

    def rope(self) -> Case:
        tokens = self.sizes.tokens
        drawn = rope_inputs(self._heads, tokens, self.device)
        between = drawn.arguments(self.shapes.qk_norm)
        inputs = []
        for qkv in self._several(*drawn.qkv.shape):
            cache = (torch.zeros(drawn.shape, device=self.device, dtype=self.dtype) for _ in "kv")
            inputs.append((qkv, *between, *cache))
        work = 2 * drawn.qkv.nbytes + drawn.cos_sin.nbytes
        return Case("qk_norm_rope_kv_write", work, "TB/s", inputs)

    def silu_mul(self) -> Case:
        inputs = [(x,) for x in self._several(self.sizes.tokens, 2 * self.shapes.intermediate)]
        return Case("silu_mul", inputs[0][0].nbytes * 3 // 2, "TB/s", inputs)

    def gelu_mul(self) -> Case:
        rows = (self.sizes.tokens, 2 * self.shapes.intermediate)
        inputs = [(x, "gelu_tanh") for x in self._several(*rows)]
        work = inputs[0][0].nbytes * 3 // 2
        return Case("activate", work, "TB/s", inputs, {"gated": True})

    def soft_cap(self) -> Case:
        logits = self._several(self.sizes.sampled_rows, self.shapes.vocabulary)
        return Case("soft_cap", 2 * logits[0].nbytes, "TB/s", [(x, 30.0) for x in logits])

    def decode(self, rows: int, length: int, windowed: bool = False) -> Case:
        """Make a case; with a window of a quarter of the length and a soft cap if `windowed`."""
        kv_bytes = self._heads.kv_bytes(rows * (length // 4 if windowed else length))
        cache = paged([length] * rows, self._heads, self.device, self._copies(kv_bytes))
        return self._decode(cache, kv_bytes, **(_windowed(length) if windowed else {}))

    def decode_shared(self) -> Case:
        """Make the case of shared prefixes. Their positions count once: they are read once."""
        prefix = self.sizes.shared_prefix
        positions = prefix.groups * prefix.shared + prefix.rows * prefix.own
        kv_bytes = self._heads.kv_bytes(positions)
        heads = self._heads
        limits = load_ops(self.ops).shared_prefix_limits(
            heads.dtype, heads.dim, heads.query // heads.kv
        )
        cache, shared = paged_with_shared_prefix(
            prefix, heads, self.device, limits, self._copies(kv_bytes)
        )
        return self._decode(cache, kv_bytes, shared=shared)

    def _decode(self, cache: Paged, kv_bytes: int, **options: Any) -> Case:
        q = self._queries(len(cache.lengths))
        given = (cache.tables, cache.slots, cache.lengths, self._heads.dim**-0.5)
        inputs = [(q, k, v, *given) for k, v in cache.caches]
        work = kv_bytes + 2 * q.nbytes
        return Case("decode_attention", work, "TB/s", inputs, options, reference_on_host=True)

    def prefill(self, chunks: int, length: int, windowed: bool = False) -> Case:
        """Make a causal case without a cached prefix; `windowed` as in `decode`.

        Masked scores are not counted as work.
        """
        lengths = [length] * chunks
        cache = paged(lengths, self._heads, self.device, copies=2)
        q, starts = self._queries(chunks * length), prefill_starts(lengths, self.device)
        given = (cache.tables, cache.slots, starts, cache.lengths, self._heads.dim**-0.5, length)
        inputs = [(q, k, v, *given) for k, v in cache.caches]
        hidden = length - length // 4 if windowed else 0  # before the window of the last token
        scores = chunks * (length * (length + 1) - hidden * (hidden + 1)) // 2
        work = 4 * scores * self._heads.query * self._heads.dim
        options = _windowed(length) if windowed else {}
        return Case("prefill_attention", work, "TFLOP/s", inputs, options, reference_on_host=True)

    def sample(self, filtered: bool = False, adjusted: bool = False) -> Case:
        """Make a case at temperature 0.7. The logits count once as work."""
        rows, vocabulary = self.sizes.sampled_rows, self.shapes.vocabulary
        filters = {"top_k": 50, "top_p": 0.95} if filtered else {}
        state = sampling_state(rows, self.device, temperature=0.7, **filters)
        if adjusted:
            given = penalties_and_biases(rows, vocabulary, self.device)
            state = replace(state, adjustments=given)
        inputs = [(3 * x, state, filtered or adjusted) for x in self._several(rows, vocabulary)]
        return Case("sample", inputs[0][0].nbytes, "TB/s", inputs, reference_on_host=True)

    def linear(self, tokens: int) -> Case:
        """Make a case whose norm is folded into the weight. Only the weight counts as work."""
        hidden, rows = self.shapes.hidden, 2 * self.shapes.intermediate
        x = self._randn(tokens, hidden)
        inputs = [(x, None, EPS, w * hidden**-0.5) for w in self._several(rows, hidden)]
        return Case("norm_gate_up_silu_mul", inputs[0][-1].nbytes, "TB/s", inputs)

    @property
    def _heads(self) -> Heads:
        shapes = self.shapes
        return Heads(shapes.query_heads, shapes.kv_heads, shapes.head_dim, self.dtype)

    def _queries(self, tokens: int) -> Tensor:
        return self._randn(tokens, self._heads.query, self._heads.dim)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _several(self, *shape: int) -> list[Tensor]:
        first = self._randn(*shape)
        return [first, *(torch.randn_like(first) for _ in range(1, self._copies(first.nbytes)))]

    def _copies(self, size: int) -> int:
        return copies(size, self.sizes)


def copies(size: int, sizes: Sizes) -> int:
    """Return how many inputs of `size` bytes exceed the L2 cache."""
    return max(2, min(64, -(-sizes.rotated_bytes // size)))


def at_least(calls: Sequence[Callable[[], Any]], count: int) -> list[Callable[[], Any]]:
    """Repeat the calls in order up to at least `count`, to hide the start of a graph."""
    return list(itertools.islice(itertools.cycle(calls), max(count, len(calls))))


def _windowed(length: int) -> dict[str, Any]:
    return {"window": length // 4, "soft_cap": 50.0}
