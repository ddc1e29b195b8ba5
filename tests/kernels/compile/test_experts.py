"""The kernels of a mixture of experts compile for Hopper as intended, on any machine.

The launches are compiled in a separate process, because Triton's interpreter, which other tests
use, replaces the compiler. Run as a script, this file prints the launches as JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from pagewire.worker.ops.contract.quantized import QuantizedInput, QuantizedWeight, ScaledWeight
from support.kernels.clean_process import report_of

SHARED_LIMIT = 227 * 1024
INT, FLOAT = torch.int32, torch.float32


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of the layers of a model."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    sigmoid: bool = False
    gpt_oss: bool = False
    quantized: str | None = None
    dtype: torch.dtype = torch.bfloat16


QWEN = Model(hidden=2048, intermediate=768, experts=128, top_k=8)
MIXTRAL = Model(hidden=4096, intermediate=14336, experts=8, top_k=2)
DEEPSEEK = Model(hidden=7168, intermediate=2048, experts=256, top_k=8, sigmoid=True)
GPT_OSS = Model(hidden=2880, intermediate=2880, experts=32, top_k=4, gpt_oss=True)
MXFP4 = replace(GPT_OSS, quantized="mxfp4")
FP8 = replace(QWEN, quantized="fp8")
BLOCKS = replace(QWEN, quantized="fp8 in blocks")
INT8 = replace(QWEN, quantized="int8")
AWQ = replace(QWEN, quantized="awq")
FLOATS = replace(QWEN, dtype=FLOAT)
CASES = {
    "one token": (QWEN, 1),
    "64 tokens": (QWEN, 64),
    "256 tokens": (QWEN, 256),
    "512 tokens": (QWEN, 512),
    "1024 tokens": (QWEN, 1024),
    "8192 tokens": (QWEN, 8192),
    "few experts, 8 tokens": (MIXTRAL, 8),
    "few experts, 8192 tokens": (MIXTRAL, 8192),
    "groups of experts": (DEEPSEEK, 64),
    "biases and clamps, 64 tokens": (GPT_OSS, 64),
    "biases and clamps, 8192 tokens": (GPT_OSS, 8192),
    "mxfp4, one token": (MXFP4, 1),
    "mxfp4, 512 tokens": (MXFP4, 512),
    "mxfp4, 8192 tokens": (MXFP4, 8192),
    "fp8, one token": (FP8, 1),
    "fp8, 8192 tokens": (FP8, 8192),
    "fp8 in blocks, one token": (BLOCKS, 1),
    "fp8 in blocks, 1024 tokens": (BLOCKS, 1024),
    "fp8 in blocks, 8192 tokens": (BLOCKS, 8192),
    "int8, 64 tokens": (INT8, 64),
    "int8, 8192 tokens": (INT8, 8192),
    "awq, one token": (AWQ, 1),
    "awq, 8192 tokens": (AWQ, 8192),
    "float32, 64 tokens": (FLOATS, 64),
    "float32, 8192 tokens": (FLOATS, 8192),
}
# Layers that are computed without sorting rows.
FEW_CASES = {
    "few: one token": (QWEN, 1),
    "few: 4 tokens": (QWEN, 4),
    "few: biases and clamps": (GPT_OSS, 1),
    "few: mxfp4": (MXFP4, 1),
    "few: fp8": (FP8, 1),
    "few: float32": (FLOATS, 2),
}
PLAIN_ON_HOPPER = {
    f"Hopper: {name}, {kind}": (model, kind == "gated")
    for name, model in (("bf16", QWEN), ("few experts", MIXTRAL))
    for kind in ("gated", "down")
}
SCALED_ON_HOPPER = {
    f"Hopper: {name}, {kind}": (model, kind == "gated")
    for name, model in (("fp8", FP8), ("fp8 in blocks", BLOCKS))
    for kind in ("gated", "down")
}
STREAMED = {"one token, streamed": (FP8,)}
# Addresses of scales of blocks, and some sums.
SPILLED_LIMIT = 400
LARGE = ["256 tokens", "1024 tokens", "8192 tokens", "few experts, 8192 tokens"]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def quantized(shape: tuple[int, ...], name: str) -> QuantizedWeight:
    from pagewire.worker.model.quantization.parts import empty_stacked
    from pagewire.worker.model.quantization.scheme import Fp8Scheme, GroupedScheme, Int8Scheme

    schemes = {
        "mxfp4": GroupedScheme(4, 32, symmetric=True, float4=True),
        "awq": GroupedScheme(4, 128, symmetric=False),
        "fp8": Fp8Scheme(),
        "fp8 in blocks": Fp8Scheme(block=(128, 128)),
        "int8": Int8Scheme(),
    }
    count, rows, columns = shape
    device = torch.device("meta")
    return empty_stacked(schemes[name], [rows] * count, columns, torch.bfloat16, device)


def quantized_input(x: torch.Tensor, weight: object) -> torch.Tensor | QuantizedInput:
    if not isinstance(weight, ScaledWeight):
        return x
    inputs = weight.input_format
    groups = 1 if inputs.group is None else -(-x.shape[1] // inputs.group)
    values = meta(*x.shape, dtype=inputs.dtype)
    return QuantizedInput(values, meta(len(x), groups, dtype=FLOAT), x.dtype)


def layer(model: Model, tokens: int) -> None:
    """Launch all kernels of a layer."""
    from pagewire.worker.ops.contract.experts import ClampedSwiglu, Routing
    from pagewire.worker.ops.triton import experts
    from pagewire.worker.ops.triton.experts.rows import sort_routes

    hidden, intermediate, count = model.hidden, model.intermediate, model.experts

    def weight(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=model.dtype)

    x, correction, groups = weight(tokens, hidden), None, {}
    if model.sigmoid:
        correction = meta(count, dtype=FLOAT)
        groups = {"scoring": "sigmoid", "groups": 8, "top_groups": 4}
    routing = Routing(count, model.top_k, **groups)
    biases, clamp = [None] * 3, None
    if model.gpt_oss:
        biases = [weight(count), weight(count, 2 * intermediate), weight(count, hidden)]
        clamp = ClampedSwiglu(1.702, 7.0)
    routes = experts.route(x, weight(count, hidden), routing, correction, biases[0])
    rows = sort_routes(routes, count)
    gate_up, down = weight(count, 2 * intermediate, hidden), weight(count, hidden, intermediate)
    given = x
    if model.quantized is not None:
        gate_up, down = (quantized(w.shape, model.quantized) for w in (gate_up, down))
        given = quantized_input(x, gate_up)
    gated = experts.experts_gate_up_silu_mul(given, gate_up, rows, biases[1], clamp)
    parts = experts.experts_down(quantized_input(gated, down), down, rows, biases[2])
    experts.add_experts(parts, routes.weights, rows, x, x, weight(tokens, 1))


def few(model: Model, tokens: int) -> None:
    """Launch the kernels of a layer with few tokens, the norm before it included."""
    from pagewire.worker.ops.contract.experts import ClampedSwiglu, Routing
    from pagewire.worker.ops.triton import experts

    hidden, intermediate, count = model.hidden, model.intermediate, model.experts

    def weight(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=model.dtype)

    residual, biases, clamp = weight(tokens, hidden), [None] * 3, None
    if model.gpt_oss:
        biases = [weight(count), weight(count, 2 * intermediate), weight(count, hidden)]
        clamp = ClampedSwiglu(1.702, 7.0)
    routing, router = Routing(count, model.top_k), weight(count, hidden)
    normed, routes = experts.norm_route(
        residual, weight(hidden), 1e-6, router, routing, None, biases[0]
    )
    gate_up, down = weight(count, 2 * intermediate, hidden), weight(count, hidden, intermediate)
    if model.quantized is not None:
        gate_up, down = (quantized(w.shape, model.quantized) for w in (gate_up, down))
    experts.experts_add(normed, routes, count, gate_up, down, residual, biases[1], biases[2], clamp)


def plain_on_hopper(model: Model, gated: bool) -> None:
    """Launch Hopper's kernel of plain weights."""
    from pagewire.worker.ops.contract.experts import ExpertRows
    from pagewire.worker.ops.triton.experts import hopper

    count, pairs = model.experts, 8192 * model.top_k
    lists = [meta(size, dtype=INT) for size in (pairs, pairs, count + 1)]
    rows = ExpertRows(model.top_k, *lists, tile=hopper.TILE, tiles=meta(2, 468, dtype=INT))
    features, k = model.hidden, model.intermediate
    if gated:
        features, k = k, features
    weight, out = meta(count, features * (2 if gated else 1), k), meta(pairs, features)
    hopper.multiply(meta(pairs, k), weight, out, rows, gated=gated)


def scaled_on_hopper(model: Model, gated: bool) -> None:
    """Launch Hopper's kernel of FP8 weights."""
    from pagewire.worker.ops.contract.experts import ExpertRows
    from pagewire.worker.ops.triton.experts import scaled_hopper

    count, pairs = model.experts, 8192 * model.top_k
    lists = [meta(size, dtype=INT) for size in (pairs, pairs, count + 1)]
    rows = ExpertRows(model.top_k, *lists, tile=128, tiles=meta(2, 640, dtype=INT))
    features, k = model.hidden, model.intermediate
    if gated:
        features, k = 2 * k, features
    weight = quantized((count, features, k), model.quantized)
    assert isinstance(weight, ScaledWeight)
    scales = meta(pairs, 1, dtype=FLOAT)
    if weight.input_format.group:
        scales = meta(k // 128, pairs + scaled_hopper.TAIL, dtype=FLOAT).T
    x = QuantizedInput(meta(pairs, k, dtype=torch.float8_e4m3fn), scales, torch.bfloat16)
    out = meta(pairs, features // (2 if gated else 1))
    scaled_hopper.multiply(x, weight, out, rows, gated=gated)


def token_streamed(model: Model) -> None:
    """Launch Hopper's kernels of one token's experts in FP8."""
    from pagewire.worker.ops.contract.experts import Routes
    from pagewire.worker.ops.triton.streamed import experts as streamed

    count, hidden, intermediate = model.experts, model.hidden, model.intermediate
    gate_up = quantized((count, 2 * intermediate, hidden), model.quantized)
    down = quantized((count, hidden, intermediate), model.quantized)
    assert isinstance(gate_up, ScaledWeight)
    assert isinstance(down, ScaledWeight)
    routes = Routes(meta(1, model.top_k, dtype=INT), meta(1, model.top_k, dtype=FLOAT))
    x = meta(1, hidden)
    inner = streamed.stream_gate_up(x, gate_up, count, routes.experts)
    streamed.stream_down_add(inner, down, count, routes, x)


def compile_cases() -> dict[str, list[dict]]:
    """Compile the launches of every case; return the tested counts."""
    from pagewire.worker.ops.triton.experts import (
        gemm,
        hopper,
        packed_gemm,
        packed_vector,
        routing,
        rows,
        scaled_gemm,
        scaled_hopper,
        vector,
        weighted_sum,
    )
    from pagewire.worker.ops.triton.streamed import experts as streamed
    from support.kernels.cross_compile import Launch, counts_of_cases

    products = (gemm, hopper, packed_gemm, scaled_gemm, scaled_hopper, vector, packed_vector)
    for module in (*products, routing, rows, streamed, weighted_sum):
        module.dependent_launch = lambda device: True
    for module in (hopper, scaled_hopper, streamed):
        module.multiprocessors = lambda device: 132

    def count(launch: Launch) -> dict[str, int]:
        return {
            "wgmma": launch.count("wgmma.mma_async"),
            "mma": launch.count("mma.sync"),
            "async_copies": launch.count("cp.async.cg.shared.global"),
            "wide_accesses": sum(".v4" in line for line in launch.ptx.splitlines()),
            "atomics": len(re.findall(r"\b(?:atom|red)\.global", launch.ptx)),
            "waits": launch.count("griddepcontrol.wait"),
            "tensor_copies": launch.count("cp.async.bulk.tensor"),
            "float4_products": launch.count("mul.bf16x2"),
            "shared_stores": launch.count("st.shared"),
            "resident": launch.resident,
            "serialized": launch.serialized,
        }

    calls = (
        (layer, CASES),
        (few, FEW_CASES),
        (plain_on_hopper, PLAIN_ON_HOPPER),
        (scaled_on_hopper, SCALED_ON_HOPPER),
        (token_streamed, STREAMED),
    )
    cases = {name: (call, *given) for call, some in calls for name, given in some.items()}
    return counts_of_cases(cases, count)


def product_of(case: str) -> str:
    """The kernel of the two products of a layer."""
    kinds = {None: "_grouped_kernel", "mxfp4": "_packed_kernel", "awq": "_packed_kernel"}
    return kinds.get(CASES[case][0].quantized, "_scaled_kernel")


@pytest.fixture(scope="module")
def launches() -> dict[str, list[dict]]:
    return report_of(Path(__file__))


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_of_a_layer(case, launches):
    product = product_of(case)
    names = ["_logits_kernel", "_choose_kernel", "_sort_kernel", product, product, "_sum_kernel"]
    assert [launch["kernel"] for launch in launches[case]] == names


@pytest.mark.parametrize("case", FEW_CASES)
def test_few_tokens_take_four_kernels_that_load_16_bytes(case, launches):
    kinds = ["_gate_up_kernel", "_down_kernel"]
    if FEW_CASES[case][0] is MXFP4:
        kinds = ["_packed_gate_up_kernel", "_packed_down_kernel"]
    found = launches[case]
    assert [launch["kernel"] for launch in found] == ["_scores_kernel", "_choose_kernel", *kinds]
    for launch in (found[0], *found[2:]):
        assert launch["wide_accesses"] > 0, launch["kernel"]


@pytest.mark.parametrize("case", PLAIN_ON_HOPPER)
def test_consumers_multiply_what_a_loader_copies(case, launches):
    [launch] = launches[case]
    assert launch["kernel"] == "experts_hopper_kernel"
    # Three consumers, two sides, four instructions of 16 products.
    assert (launch["wgmma"], launch["tensor_copies"]) == (3 * 2 * 4, 3 + 2)
    assert not launch["serialized"]


@pytest.mark.parametrize("case", SCALED_ON_HOPPER)
def test_two_consumers_add_sums_of_128_products(case, launches):
    [launch] = launches[case]
    assert launch["kernel"] == "experts_scaled_hopper_kernel"
    _, gated = SCALED_ON_HOPPER[case]
    # Two consumers, four instructions of 32 products, for 64 rows or twice 64.
    assert launch["wgmma"] == 2 * 4 * 3
    # The loader copies the first weights separately, before their inputs are available.
    assert launch["tensor_copies"] == 2 * (5 if gated else 2)
    assert not launch["serialized"]


@pytest.mark.parametrize("case", STREAMED)
def test_one_token_is_streamed(case, launches):
    gate_up, down = launches[case]
    # Two tiles at a time, or six tiles of twice four experts, of four instructions each.
    assert (gate_up["wgmma"], down["wgmma"]) == (2 * 4, 6 * 2 * 4)
    # The loader and the consumer wait for the choice; copies of the down projection do not wait.
    assert (gate_up["waits"], down["waits"]) == (2, 1)
    # Programs of both kernels run on a multiprocessor at once.
    assert gate_up["shared"] + down["shared"] + 2 * 1024 <= 228 * 1024
    assert (gate_up["resident"], down["resident"]) == (2, 2)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] is MXFP4])
def test_mxfp4_is_widened_in_the_registers_of_the_tensor_cores(case, launches):
    for launch in launches[case]:
        if launch["kernel"] == "_packed_kernel":
            assert launch["float4_products"] > 0
            assert launch["shared_stores"] <= 8  # of results; weights do not pass through memory


@pytest.mark.parametrize(
    "case", [*CASES, *FEW_CASES, *PLAIN_ON_HOPPER, *SCALED_ON_HOPPER, *STREAMED]
)
def test_fits_the_multiprocessor(case, launches):
    for launch in launches[case]:
        assert launch["shared"] <= SHARED_LIMIT
        blocked = case.startswith("Hopper: fp8 in blocks")
        assert launch["spilled"] <= (SPILLED_LIMIT if blocked else 0), launch["kernel"]


@pytest.mark.parametrize("case", [*CASES, *FEW_CASES, *PLAIN_ON_HOPPER, *SCALED_ON_HOPPER])
def test_waits_and_adds_in_order(case, launches):
    """Only the numbers of pairs, on which no result depends, have the order of programs."""
    for launch in launches[case]:
        # Consumers and the loader wait, with or without tiles.
        waits = 4 if case in SCALED_ON_HOPPER else 1
        many = case in CASES and CASES[case][1] > 4
        numbers = many and launch["kernel"] == "_choose_kernel"
        found = launch["waits"], launch["atomics"] > 0
        assert found == (waits, numbers), launch["kernel"]


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] is not FLOATS])
def test_weights_are_copied_asynchronously_to_tensor_cores(case, launches):
    for launch in launches[case]:
        if launch["kernel"] in ("_logits_kernel", product_of(case)):
            assert launch["async_copies"] > 0, launch["kernel"]
            assert launch["mma"] + launch["wgmma"] > 0, launch["kernel"]


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0].quantized is not None])
def test_quantized_experts_have_one_kind_of_instruction(case, launches):
    products = [launch for launch in launches[case] if launch["kernel"] == product_of(case)]
    assert len(products) == 2
    assert all(launch["wgmma"] > 0 and launch["mma"] == 0 for launch in products)


@pytest.mark.parametrize("case", LARGE)
def test_large_batches_run_on_warpgroup_instructions(case, launches):
    grouped = [launch for launch in launches[case] if launch["kernel"] == "_grouped_kernel"]
    assert all(launch["wgmma"] > 0 and launch["mma"] == 0 for launch in grouped)


@pytest.mark.parametrize("case", LARGE)
def test_results_are_stored_16_bytes_at_a_time(case, launches):
    for launch in launches[case]:
        if launch["kernel"] in ("_grouped_kernel", "_sum_kernel"):
            assert launch["wide_accesses"] > 0, launch["kernel"]


if __name__ == "__main__":
    print(json.dumps(compile_cases()))
