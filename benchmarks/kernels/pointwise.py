"""Time the norm, activation, sampling and small-batch linear kernels on one GPU.

    PYTHONPATH=services:shared python3 benchmarks/kernels/pointwise.py \
        [--tune 1 2 ...] [--output FILE]

Every figure is the median of CUDA graph replays; a graph runs a kernel on enough distinct weights
or inputs to exceed the L2 cache many times. Each kernel is first compared with its reference. With
`--tune` the linear kernels' configurations are searched by coordinate descent on the time of a
step's linear layers; the entries of `linear_config` come from this search. All figures go to the
file, a summary to the terminal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from pagewire.bench.kernels.inputs import sampling_state
from pagewire.bench.kernels.shapes import MODELS, Shapes
from pagewire.bench.kernels.timing import graph_us
from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.worker.ops import load_ops
from pagewire.worker.ops.contract.sampling import SamplingState
from pagewire.worker.ops.reference import activation as reference_activation
from pagewire.worker.ops.reference import linear as reference_linear
from pagewire.worker.ops.reference import norm as reference_norm
from pagewire.worker.ops.reference import sampling as reference_sampling
from pagewire.worker.ops.triton import linear, sampling
from pagewire.worker.ops.triton.linear_config import (
    Config,
    SkinnyConfig,
    VectorConfig,
    linear_config,
)
from pagewire.worker.ops.triton.logprobs import logprobs
from pagewire.worker.ops.triton.rowwise import activation, norm

EPS = 1e-6
DEVICE = torch.device("cuda")
ROTATE_BYTES = 2**30
# Errors of a configuration that does not fit the device, here or in the compiler.
TOKENS = (1, 2, 4, 8, 16, 32, 64)
UNFIT = (triton.runtime.errors.OutOfResources, RuntimeError)


@dataclass(frozen=True, slots=True)
class Model(Shapes):
    """A decoder as a whole."""

    name: str
    layers: int

    @property
    def gemms(self) -> dict[str, Gemm]:
        ops = {"qkv": "norm_linear", "gate_up": "norm_gate_up_silu_mul", "lm_head": "norm_linear"}
        return {
            name: Gemm(ops.get(name, "linear_add"), k, rows, folded=name != "lm_head")
            for name, (rows, k) in self.matrices.items()
        }


@dataclass(frozen=True, slots=True)
class Gemm:
    """One of the linear operations with the shape `[rows, k]` of its weight.

    `folded`: the weight includes that of the norm before it.
    """

    op: str
    k: int
    rows: int
    folded: bool = True

    @property
    def bytes(self) -> int:
        return 2 * self.k * self.rows


QWEN = Model(**asdict(MODELS["qwen3-0.6b"]), name="Qwen3-0.6B", layers=28)
LLAMA = Model(**asdict(MODELS["llama-3.1-8b"]), name="Llama-3.1-8B", layers=32)


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, scale)


def relative_error(out: Tensor, expected: Tensor) -> float:
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


class Inputs:
    """Inputs of one product: enough weights to exceed the cache, one vector of each other input."""

    def __init__(self, shape: Gemm, tokens: int, copies: int | None = None) -> None:
        copies = copies or max(3, -(-ROTATE_BYTES // shape.bytes))
        self.x = randn(tokens, shape.k)
        self.norm = None if shape.folded else randn(shape.k)
        self.weights = [randn(shape.rows, shape.k, scale=shape.k**-0.5) for _ in range(copies)]
        self.stream = randn(tokens, shape.rows)

    def with_tokens(self, tokens: int) -> Inputs:
        other = object.__new__(Inputs)
        other.x, other.norm = randn(tokens, self.x.shape[1]), self.norm
        other.weights, other.stream = self.weights, randn(tokens, self.stream.shape[1])
        return other

    def calls(self, op: str, functions: Any, **config: Any) -> list[Callable[[], Tensor]]:
        function = getattr(functions, op)

        def call(weight: Tensor) -> Tensor:
            if op == "linear_add":
                return function(self.x, weight, self.stream, **config)
            if op == "linear":
                return function(self.x, weight, **config)
            return function(self.x, self.norm, EPS, weight, **config)

        return [partial(call, weight) for weight in self.weights]


class CublasPath:
    """The same operations by cuBLAS and this project's pointwise kernels."""

    @staticmethod
    def norm_linear(x: Tensor, g: Tensor | None, eps: float, weight: Tensor) -> Tensor:
        return F.linear(norm.rms_norm(x, g, eps), weight)

    @staticmethod
    def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return residual.addmm_(x, weight.t())

    @staticmethod
    def norm_gate_up_silu_mul(x: Tensor, g: Tensor | None, eps: float, weight: Tensor) -> Tensor:
        return activation.silu_mul(F.linear(norm.rms_norm(x, g, eps), weight))

    @staticmethod
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


def candidates(shape: Gemm, tokens: int) -> list[Config | None]:
    """Return the configurations worth timing, None being cuBLAS."""
    power = triton.next_power_of_2(shape.k)
    vector = [
        VectorConfig(rows, block, warps)
        for rows, block, warps in product((2, 4, 8), (1024, 2048, 4096, 16384), (2, 4, 8))
        if block <= power and 16 <= rows * block // (32 * warps) <= 64
    ]
    skinny = [SkinnyConfig(*values) for values in SKINNY if values[0] >= tokens // 2]
    if tokens == 1:
        return [*vector]
    if tokens <= 4:
        return [*(c for c in vector if c.block_k >= shape.k), *skinny, None]
    return [*skinny, None]


SKINNY = (
    (16, 256, 2, 6),
    (16, 256, 2, 8),
    (16, 512, 2, 3),
    (32, 128, 2, 5),
    (32, 256, 4, 6),
    (32, 512, 4, 4),
    (64, 64, 4, 8),
    (64, 128, 4, 3),
    (64, 128, 4, 6),
    (64, 256, 4, 4),
    (128, 64, 4, 5),
    (128, 64, 8, 5),
    (128, 128, 8, 3),
)


def warm(task: tuple[Gemm, int, Config]) -> None:
    """Compile one configuration into the cache on disk; runs in its own process."""
    shape, tokens, config = task
    small = Gemm(shape.op, shape.k, 512)
    inputs = Inputs(small, tokens, copies=1)
    try:
        inputs.calls(shape.op, linear, config=config)[0]()
        torch.cuda.synchronize()
    except UNFIT:
        pass


def warm_all(token_counts: list[int]) -> None:
    """Compile in parallel the configurations that `tune` times."""
    tasks = {}
    for model, tokens in product((QWEN, LLAMA), token_counts):
        for shape in model.gemms.values():
            for config in candidates(shape, tokens):
                k = shape.k if isinstance(config, VectorConfig) else 4096  # skinny: any k
                if config is not None:
                    key = (shape.op, k, max(tokens, 8 if k == 4096 else 1), config)
                    tasks[key] = (Gemm(shape.op, k, 512), tokens, config)
    context = get_context("spawn")
    with ProcessPoolExecutor(14, mp_context=context) as pool:
        list(pool.map(warm, tasks.values(), chunksize=2))


def check_gemms() -> dict[str, float]:
    """Return the largest relative error of each linear operation over the models' shapes."""
    worst: dict[str, float] = {}
    for model, tokens in product((QWEN, LLAMA), (1, 2, 7, 16, 33, 64, 100)):
        for shape in model.gemms.values():
            inputs = Inputs(shape, tokens, copies=1)
            kept = inputs.stream.clone()
            out = inputs.calls(shape.op, linear)[0]().clone()
            inputs.stream.copy_(kept)
            expected = inputs.calls(shape.op, reference_linear)[0]()
            name = f"{shape.op} {'vector' if tokens == 1 else 'tokens > 1'}"
            worst[name] = max(worst.get(name, 0.0), relative_error(out, expected))
    return worst


def time_gemms(model: Model) -> list[dict]:
    """Time each product of a model alone, at 1 to 64 tokens."""
    rows = []
    for name, shape in model.gemms.items():
        inputs = Inputs(shape, 1)
        for tokens in TOKENS:
            batch = inputs.with_tokens(tokens)
            cublas = graph_us(batch.calls(shape.op, CublasPath))
            table = graph_us(batch.calls(shape.op, linear))
            row = {"model": model.name, "product": name, "tokens": tokens, "cublas_us": cublas}
            rows.append(row | {"table_us": table, "table_tb_s": shape.bytes / table / 1e6})
    return rows


class Decoder:
    """The decode step of a model on random weights, as the worker runs it, for up to 64 rows."""

    def __init__(self, model: Model, rows: int = TOKENS[-1], context: int = 720) -> None:
        self.model, self.ops = model, load_ops("triton")
        gemms = dict(model.gemms)
        self.lm_head = self._weight(gemms.pop("lm_head"))
        self.layers = [
            {name: self._weight(shape) for name, shape in gemms.items()}
            for _ in range(model.layers)
        ]
        self.norm = randn(model.hidden)
        self.head_norm = randn(model.head_dim) if model.qk_norm else None
        blocks = -(-context // 16)
        shape = (rows * blocks + 1, model.kv_heads, 16, model.head_dim)
        self.caches = [(randn(*shape), randn(*shape)) for _ in range(model.layers)]
        int32: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        order = torch.randperm(rows * blocks, device="cuda").int() + 1
        self.tables = torch.zeros(rows + 1, blocks, **int32)
        self.tables[:rows] = order.view(rows, blocks)
        self.slots = torch.arange(rows, **int32)
        self.lengths = torch.full((rows,), context, **int32)
        self.cos_sin = torch.randn(context, model.head_dim, device="cuda")
        self.last = torch.zeros(rows, **int32)
        self.embedding = randn(1000, model.hidden)

    @staticmethod
    def _weight(shape: Gemm) -> Tensor:
        return randn(shape.rows, shape.k, scale=shape.k**-0.5)

    def step(self, rows: int, attention: bool = True) -> Tensor:
        ops = self.ops
        stream = F.embedding(self.last[:rows], self.embedding)
        positions = self.lengths[:rows] - 1
        for layer, cache in zip(self.layers, self.caches, strict=True):
            if attention:
                out = self.attend(stream, layer["qkv"], positions, cache)
            else:
                qkv = ops.norm_linear(stream, None, EPS, layer["qkv"])
                out = qkv[:, : layer["o"].shape[1]]
            ops.linear_add(out, layer["o"], stream)
            act = ops.norm_gate_up_silu_mul(stream, None, EPS, layer["gate_up"])
            ops.linear_add(act, layer["down"], stream)
        return ops.norm_linear(stream, self.norm, EPS, self.lm_head)

    def attend(
        self, stream: Tensor, qkv: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        rows = len(stream)
        slots, lengths = self.slots[:rows], self.lengths[:rows]
        norms = (self.head_norm, self.head_norm)
        place = (self.cos_sin, positions, slots, self.tables)
        q = self.ops.norm_qkv_rope_kv_write(stream, EPS, qkv, None, *norms, *place, *cache)
        scale = self.model.head_dim**-0.5
        return self.ops.decode_attention(q, *cache, self.tables, slots, lengths, scale).flatten(1)


def time_steps(decoder: Decoder, attention: bool) -> list[dict]:
    """Time whole decode steps, sampling included, in one graph each."""
    rows = []
    for tokens in TOKENS:
        decoder.lengths.fill_(504 if tokens == 1 else 720)
        state = sampling_state(tokens, DEVICE, temperature=0.7)

        def step(tokens: int = tokens, state: SamplingState = state) -> Tensor:
            return sampling.sample(decoder.step(tokens, attention), state, filtered=False)

        us = graph_us([step], replays=15, warm_s=0.4)
        row = {"model": decoder.model.name, "tokens": tokens, "attention": attention, "us": us}
        rows.append(row | {"tok_s": tokens / us * 1e6})
    return rows


def time_model(model: Model) -> list[dict]:
    """Time the steps of a model with cuBLAS and with the kernels of the table."""
    decoder, rows = Decoder(model), []
    for path, attention in product(("cublas", "table"), (False, True)):
        with patch.object(
            linear, "linear_config", linear_config if path == "table" else lambda *shape: None
        ):
            rows += [row | {"path": path} for row in time_steps(decoder, attention)]
    return rows


class Tuner:
    """Coordinate descent on the time of all linear layers of a step."""

    def __init__(self, model: Model) -> None:
        self.model, self.decoder = model, Decoder(model)
        self.table: dict[tuple[int, int], Config | None] = {}

    def microseconds(self, tokens: int) -> float:
        """Time a step with the kernels of `table` instead of the shipped table's."""
        with patch.object(linear, "linear_config", self._look_up):
            try:
                return graph_us([lambda: self.decoder.step(tokens, attention=False)])
            except UNFIT:
                return float("inf")

    def tune(self, tokens: int, rounds: int = 2) -> dict:
        shapes = {name: (p.rows, p.k) for name, p in self.model.gemms.items()}
        shipped = {shape: linear_config(tokens, *shape, 2) for shape in shapes.values()}
        self.table = dict(shipped)
        best = first = self.microseconds(tokens)
        for name in list(self.model.gemms) * rounds:
            shape = shapes[name]
            for config in candidates(self.model.gemms[name], tokens):
                held, self.table[shape] = self.table[shape], config
                us = self.microseconds(tokens)
                if us < best:
                    best = us
                else:
                    self.table[shape] = held
        found = {name: repr(self.table[shape]) for name, shape in shapes.items()}
        return {"model": self.model.name, "tokens": tokens, "us": first, "best_us": best} | found

    def _look_up(self, tokens: int, rows: int, k: int, item_size: int) -> Config | None:
        return self.table[rows, k]


def sorted_top_p(logits: Tensor, p: float) -> Tensor:
    """Top-p by sorting on the device: the baseline of the pivot search."""
    ordered, ids = logits.float().sort(-1, descending=True)
    mass = ordered.softmax(-1)
    ordered.masked_fill_(mass.cumsum(-1) - mass > p, -torch.inf)
    drawn = torch.empty_like(ordered).exponential_()
    return ids.gather(1, (ordered.softmax(-1) / drawn).argmax(-1, keepdim=True))


def time_sampling() -> list[dict]:
    modes: dict[str, tuple[dict[str, Any], bool]] = {
        "greedy": ({"temperature": 0.0}, False),
        "temperature": ({"temperature": 0.7}, False),
        "top_k 50": ({"top_k": 50}, True),
        "top_p 0.95": ({"top_p": 0.95}, True),
        "top_k 50, top_p 0.95": ({"top_k": 50, "top_p": 0.95}, True),
        "min_p 0.05": ({"min_p": 0.05}, True),
        "filters captured, none set": ({}, True),
    }
    rows = []
    for batch in (1, 16, 64, 256):
        copies = max(2, min(32, ROTATE_BYTES // (batch * QWEN.vocabulary * 2)))
        logits = [randn(batch, QWEN.vocabulary, scale=3.0) for _ in range(copies)]
        for name, (given, filtered) in modes.items():
            state = sampling_state(batch, DEVICE, **given)
            calls = [partial(sampling.sample, x, state, filtered) for x in logits]
            rows.append({"mode": name, "rows": batch, "us": graph_us(calls)})
            same = sampling.sample(logits[0], state, filtered)
            expected = reference_sampling.sample(logits[0], state)
            rows[-1]["equal_to_twin"] = (same == expected).float().mean().item()
        tokens = torch.zeros(batch, dtype=torch.int32, device="cuda")
        tops = [partial(logprobs, x, tokens, 20) for x in logits]
        rows.append({"mode": "logprobs 20", "rows": batch, "us": graph_us(tops)})
        largest = [partial(torch.argmax, x, -1) for x in logits]
        rows.append({"mode": "torch argmax", "rows": batch, "us": graph_us(largest)})
        sorts = [partial(sorted_top_p, x, 0.95) for x in logits[:4]]
        rows.append({"mode": "torch sort top_p", "rows": batch, "us": graph_us(sorts, 3)})
    return rows


def time_pointwise() -> list[dict]:
    """Time norms and the activation beside a copy of the same bytes and eager torch."""
    moved = {"copy": 2, "rms_norm": 2, "silu_mul": 3}  # tensors of a call
    rows = []
    for tokens, width in product((16, 256, 4096), (1024, 2048, 4096)):
        for name, calls in pointwise_cases(tokens, width).items():
            us = graph_us(calls)
            bytes_moved = moved[name.split()[0]] * tokens * width * 2
            row = {"op": name, "tokens": tokens, "width": width, "us": us}
            rows.append(row | {"tb_s": bytes_moved / us / 1e6})
    return rows


def pointwise_cases(tokens: int, width: int) -> dict[str, list[Callable]]:
    copies = min(64, max(4, -(-ROTATE_BYTES // (tokens * width * 2))))
    data = [(randn(tokens, width), randn(tokens, width)) for _ in range(copies)]
    gate_ups = [randn(tokens, 2 * width) for _ in data]
    weight = randn(width)
    cases: dict[str, list[Callable]] = {
        "copy": [lambda a=a, b=b: torch.mul(a, 1.0, out=b) for a, b in data]
    }
    for suffix, norms, activations in (
        ("", norm, activation),
        (" eager", reference_norm, reference_activation),
    ):
        rms_norm = norms.rms_norm
        cases["rms_norm" + suffix] = [lambda a=a, f=rms_norm: f(a, weight, EPS) for a, _ in data]
        cases["silu_mul" + suffix] = [lambda x=x, f=activations.silu_mul: f(x) for x in gate_ups]
    return cases


def check_pointwise() -> dict[str, float]:
    worst = {"rms_norm": 0.0, "silu_mul": 0.0}
    for tokens, width in product((1, 77, 4096), (1024, 3072, 4096)):
        x, weight = randn(tokens, width), randn(width)
        pairs = {
            "rms_norm": [m.rms_norm(x, weight, EPS) for m in (norm, reference_norm)],
            "silu_mul": [m.silu_mul(x) for m in (activation, reference_activation)],
        }
        for name, (out, expected) in pairs.items():
            worst[name] = max(worst[name], relative_error(out, expected))
    return worst


def copy_tb_s() -> float:
    """Bandwidth of an elementwise kernel that reads and writes 2 GiB each."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    us = graph_us([lambda: torch.mul(source, 1.0, out=target)] * 2)
    return 2 * source.nbytes / us / 1e6


def read_tb_s() -> float:
    """Bandwidth of the matrix-vector kernel on a weight of 8 GiB."""
    weight = torch.empty(2**20, 4096, dtype=torch.bfloat16, device="cuda").normal_()
    x = randn(1, 4096)
    us = graph_us([lambda: linear.linear(x, weight)] * 2)
    return weight.nbytes / us / 1e6


UNITS = {"us": "us", "best_us": "us", "cublas_us": "us", "table_us": "us", "tok_s": "tokens/s"}
UNITS |= {"tb_s": "TB/s", "table_tb_s": "TB/s", "equal_to_twin": "ratio"}


def figures(result: dict) -> Iterator[Figure]:
    """The measurements, named by their workload."""
    for name in ("copy_tb_s", "read_tb_s"):
        yield Figure(name.removesuffix("_tb_s"), result[name], "TB/s")
    for name, error in result.get("errors", {}).items():
        yield Figure(f"{name}/relative_error", error, "ratio")
    for part in ("pointwise", "sampling", "products", "steps", "tuned"):
        for row in result.get(part, []):
            at = [f"{key} {value}" for key, value in row.items() if key not in UNITS]
            for key in filter(UNITS.get, row):
                yield Figure(f"{part}/{', '.join(at)}/{key}", row[key], UNITS[key])


def print_summary(result: dict) -> None:
    """Print the available parts of the result."""
    empty: dict = {name: [] for name in ("pointwise", "sampling", "products", "steps", "tuned")}
    result = empty | {"errors": None} | result
    print(f"copy {result['copy_tb_s']:.2f}, read {result['read_tb_s']:.2f} TB/s")
    print(f"relative errors {result['errors']}")
    print("\npointwise, 4096 tokens: us (TB/s)")
    for row in result["pointwise"]:
        if row["tokens"] == 4096:
            print(f"  {row['width']:5} {row['op']:48} {row['us']:8.2f} ({row['tb_s']:.2f})")
    print("\nsampling, us at 1 / 16 / 64 / 256 rows")
    for mode in dict.fromkeys(row["mode"] for row in result["sampling"]):
        found = [row for row in result["sampling"] if row["mode"] == mode]
        same = min(row.get("equal_to_twin", 1.0) for row in found)
        print(f"  {mode:28}", *(f"{row['us']:9.1f}" for row in found), f" same {same:.3f}")
    print("\nproducts alone: cuBLAS, table us (TB/s)")
    for row in result["products"]:
        print(
            f"  {row['model']:13} {row['product']:8} {row['tokens']:3} {row['cublas_us']:8.2f} "
            f"{row['table_us']:8.2f} ({row['table_tb_s']:.2f})"
        )
    print("\nwhole steps")
    for row in result["steps"]:
        print(
            f"  {row['model']:13} {row['path']:7} attention {row['attention']!s:5} "
            f"{row['tokens']:3} {row['us']:9.1f} us {row['tok_s']:9.0f} tok/s"
        )
    for row in result["tuned"]:
        print("tuned", row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tune", type=int, nargs="*", default=[], help="token counts to search configurations for"
    )
    parser.add_argument("--output", type=Path, default=Path("pointwise.jsonl"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    began = perf_counter()
    result: dict[str, Any] = {"copy_tb_s": copy_tb_s(), "read_tb_s": read_tb_s()}

    def save(name: str, value: object) -> None:
        result[name] = value
        write_rows(arguments.output, figures(result), command_line())
        print(f"{name}: {perf_counter() - began:.0f} s", flush=True)

    try:
        save("errors", check_gemms() | check_pointwise())
        save("pointwise", time_pointwise())
        save("sampling", time_sampling())
        save("products", [row for model in (QWEN, LLAMA) for row in time_gemms(model)])
        save("steps", [row for model in (QWEN, LLAMA) for row in time_model(model)])
        if arguments.tune:
            warm_all(arguments.tune)
            tuners = (Tuner(model) for model in (QWEN, LLAMA))
            save("tuned", [tuner.tune(tokens) for tuner in tuners for tokens in arguments.tune])
    finally:
        print_summary(result)


if __name__ == "__main__":
    main()
