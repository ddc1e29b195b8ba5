"""The kernels of a mixture of experts against their references."""

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from pagewire.worker.ops.contract.experts import ClampedSwiglu, ExpertRows, Routes, Routing
from pagewire.worker.ops.reference import experts as reference
from pagewire.worker.ops.triton import experts
from pagewire.worker.ops.triton.experts import hopper
from pagewire.worker.ops.triton.experts.config import (
    GEMM_TABLE,
    LARGEST,
    MANY_TOKENS,
    MAX_VECTOR_TOKENS,
    GemmConfig,
    gemm_config,
)
from pagewire.worker.ops.triton.experts.rows import copy_rows, max_tiles, sort_routes
from support.kernels.comparison import (
    CUDA,
    DTYPES,
    FULL_SIZE,
    TOLERANCE,
    assert_near,
    poisoned_outputs,
)
from support.kernels.ordered_dot import by_tile, in_order

ROUTINGS = {
    "softmax over all": Routing(experts=6, top_k=2, renormalize=False),
    "softmax over the chosen": Routing(experts=6, top_k=3),
    "scaled": Routing(experts=5, top_k=5, scale=0.25),
    "one of one": Routing(experts=1, top_k=1),
    "sigmoid": Routing(experts=7, top_k=3, scoring="sigmoid", renormalize=False),
    "groups": Routing(experts=24, top_k=4, scoring="sigmoid", groups=6, top_groups=2, scale=2.5),
    "groups by their best": Routing(
        experts=12, top_k=3, renormalize=False, groups=4, top_groups=2, scale=16.0
    ),
}
# tokens, experts, top_k: one token, tiles that are not full, more experts than pairs.
SIZES = [(1, 8, 2), (7, 3, 1), (19, 5, 3), (40, 2, 2)]
if FULL_SIZE:
    SIZES += [(1, 128, 8), (256, 128, 8), (4096, 128, 8)]
SMALL = GemmConfig(tile=16, rows=32, block_k=32, warps=2, stages=2)


class Inputs:
    """Random inputs of one layer; weights are scaled so that outputs are near 1."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        tokens: int = 9,
        num_experts: int = 4,
        top_k: int = 2,
        hidden: int = 48,
        intermediate: int = 40,
    ) -> None:
        torch.manual_seed(tokens + num_experts)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        self.x = draw(tokens, hidden).to(dtype)
        self.gate_up = (draw(num_experts, 2 * intermediate, hidden) / hidden**0.5).to(dtype)
        self.down = (draw(num_experts, hidden, intermediate) / intermediate**0.5).to(dtype)
        self.router = (draw(num_experts, hidden) / hidden**0.5).to(dtype)
        self.residual = draw(tokens, hidden).to(dtype)
        self.experts = draw(tokens, num_experts).argsort(1)[:, :top_k].int()
        self.weights = draw(tokens, top_k).softmax(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 17])
def test_route(name, tokens, dtype, device):
    routing = ROUTINGS[name]
    a = Inputs(device, dtype, tokens=tokens, num_experts=routing.experts, top_k=1)
    correction = None
    if routing.scoring == "sigmoid":
        correction = torch.randn(routing.experts, device=device)
    for config in (None, MANY_TOKENS):
        with poisoned_outputs():
            out = experts.route(a.x, a.router, routing, correction, config=config)
        expected = reference.route(a.x, a.router, routing, correction)
        assert out.experts.tolist() == expected.experts.tolist()
        assert_near(out.weights, expected.weights, 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_route_with_a_bias(dtype, device):
    a = Inputs(device, dtype, tokens=17, num_experts=6, top_k=1)
    bias = torch.randn(6, device=device).to(dtype)
    with poisoned_outputs():
        out = experts.route(a.x, a.router, Routing(6, 3), None, bias)
    expected = reference.route(a.x, a.router, Routing(6, 3), None, bias)
    assert out.experts.tolist() == expected.experts.tolist()
    assert_near(out.weights, expected.weights, 2e-6)
    plain = reference.route(a.x, a.router, Routing(6, 3))
    assert plain.experts.tolist() != expected.experts.tolist()


def test_a_correction_chooses_but_does_not_weigh(device):
    routing = Routing(experts=4, top_k=1, scoring="sigmoid", renormalize=False)
    x, router = torch.eye(1, 4, device=device), torch.zeros(4, 4, device=device)
    correction = torch.tensor([0.0, 0.0, 9.0, 0.0], device=device)
    for ops in (experts, reference):
        routes = ops.route(x, router, routing, correction)
        assert (routes.experts.tolist(), routes.weights.tolist()) == ([[2]], [[0.5]])


def test_of_equal_experts_the_lower_is_chosen(device):
    x, router = torch.ones(2, 32, device=device), torch.ones(5, 32, device=device)
    for ops in (experts, reference):
        routes = ops.route(x, router, Routing(experts=5, top_k=3))
        assert routes.experts.tolist() == [[0, 1, 2]] * 2
        assert_near(routes.weights, torch.full((2, 3), 1 / 3, device=device), 1e-6)


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
def test_a_token_that_is_not_finite_keeps_valid_experts_and_is_found(device):
    x = torch.ones(2, 32, device=device)
    x[0, 3] = torch.nan
    router = torch.randn(6, 32, device=device)
    for ops in (experts, reference):
        for routing in (Routing(6, 2), Routing(6, 2, renormalize=False), Routing(6, 2, "sigmoid")):
            routes = ops.route(x, router, routing)
            assert routes.experts[0].tolist() == [0, 1]
            assert routes.weights.isnan().tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), SIZES)
def test_sort_by_expert(tokens, num_experts, top_k, tile, device):
    a = Inputs(device, torch.float32, tokens=tokens, num_experts=num_experts, top_k=top_k)
    check_sorted(a.experts, num_experts, tile)


def check_sorted(chosen: Tensor, num_experts: int, tile: int) -> None:
    """Compare the rows of each expert with the reference, and the tiles with what they cover."""
    with poisoned_outputs():
        out = experts.sort_by_expert(chosen, num_experts, tile=tile)
    assert out.tile == tile
    check_rows(out, chosen, num_experts)


def check_rows(out: ExpertRows, chosen: Tensor, num_experts: int) -> None:
    expected = reference.sort_by_expert(chosen, num_experts)
    for name in ("pairs", "rows", "starts"):
        assert getattr(out, name).dtype == torch.int32
    assert out.starts.tolist() == expected.starts.tolist()
    pairs, of_pairs = out.pairs.long(), chosen.flatten()
    assert out.rows[pairs].tolist() == list(range(chosen.numel()))
    assert of_pairs[pairs].tolist() == of_pairs[expected.pairs.long()].tolist()
    starts = expected.starts.tolist()
    wanted = [
        (expert, row)
        for expert in range(num_experts)
        for row in range(starts[expert], starts[expert + 1], out.tile)
    ]
    unused = out.tiles.shape[1] - len(wanted)
    wanted += [(-1 - len(wanted), chosen.numel())] * unused
    assert list(zip(*out.tiles.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("expert", [0, 1, 4])
def test_all_rows_at_one_expert(expert, device):
    chosen = torch.full((37, 1), expert, dtype=torch.int32, device=device)
    check_sorted(chosen, 5, 16)


@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(150, 6, 3), (2500, 5, 1)])
def test_several_programs_sort(tokens, num_experts, top_k, device):
    a = Inputs(device, torch.float32, tokens=tokens, num_experts=num_experts, top_k=top_k)
    check_sorted(a.experts, num_experts, 16)


@pytest.mark.parametrize("tokens", [4, 5, 64, 65, 300])
@pytest.mark.parametrize("name", ["softmax over the chosen", "one of one", "groups"])
def test_routes_are_numbered_where_they_may_be_sorted(name, tokens, device):
    routing = ROUTINGS[name]
    a = Inputs(device, torch.float32, tokens=tokens, num_experts=routing.experts, top_k=1)
    with poisoned_outputs():
        _, routes = experts.norm_route(a.x, torch.ones_like(a.x[0]), 1e-6, a.router, routing)
    if tokens <= MAX_VECTOR_TOKENS:
        assert routes.numbered is None
    else:
        assert routes.numbered is not None
        counts = routes.experts.flatten().bincount(minlength=routing.experts).tolist()
        assert routes.numbered.counts.tolist() == counts
        numbers = routes.numbered.numbers.flatten()
        for expert, count in enumerate(counts):
            found = numbers[routes.experts.flatten() == expert].sort().values
            assert found.tolist() == list(range(count))
    with poisoned_outputs():
        check_rows(sort_routes(routes, routing.experts), routes.experts, routing.experts)


@pytest.mark.parametrize("tile", [1, 16])
def test_no_routes_need_more_tiles_than_there_are(tile):
    generator = torch.Generator().manual_seed(0)
    for pairs in (1, 5, 16, 33, 100):
        for num_experts in (1, 3, 40):
            limit = max_tiles(pairs, num_experts, tile)
            for _ in range(20):
                chosen = torch.randint(num_experts, (pairs,), generator=generator)
                counts = torch.bincount(chosen, minlength=num_experts)
                assert int(((counts + tile - 1) // tile).sum()) <= limit
            most = [1] * (min(pairs, num_experts) - 1)
            most.append(pairs - len(most))
            assert sum(-(-count // tile) for count in most) == limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "intermediate"), [(48, 40), (32, 100), (130, 7)])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), SIZES)
def test_the_experts(tokens, num_experts, top_k, hidden, intermediate, dtype, device):
    sizes = {"tokens": tokens, "num_experts": num_experts, "top_k": top_k}
    a = Inputs(device, dtype, hidden=hidden, intermediate=intermediate, **sizes)
    rows = experts.sort_by_expert(a.experts, num_experts, tile=SMALL.tile)
    with poisoned_outputs():
        gated = experts.experts_gate_up_silu_mul(a.x, a.gate_up, rows, config=SMALL)
        parts = experts.experts_down(gated, a.down, rows, config=SMALL)
    expected = reference.experts_gate_up_silu_mul(a.x, a.gate_up, rows)
    assert_near(gated, expected, 2 * TOLERANCE[dtype])
    assert_near(parts, reference.experts_down(gated, a.down, rows), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamp", [None, ClampedSwiglu(1.702, 0.9)], ids=["silu", "clamped"])
def test_the_experts_with_biases(clamp, dtype, device):
    a = Inputs(device, dtype, tokens=19, num_experts=5, top_k=3)
    inner, outer = (torch.randn(5, size, device=device).to(dtype) for size in (80, 48))
    rows = experts.sort_by_expert(a.experts, 5, tile=SMALL.tile)
    with poisoned_outputs():
        gated = experts.experts_gate_up_silu_mul(a.x, a.gate_up, rows, inner, clamp, config=SMALL)
        parts = experts.experts_down(gated, a.down, rows, outer, config=SMALL)
    expected = reference.experts_gate_up_silu_mul(a.x, a.gate_up, rows, inner, clamp)
    assert_near(gated, expected, 2 * TOLERANCE[dtype])
    assert_near(parts, reference.experts_down(gated, a.down, rows, outer), TOLERANCE[dtype])


def test_the_clamped_reference_follows_the_formula(device):
    clamp = ClampedSwiglu(alpha=2.0, limit=1.5)
    a = Inputs(device, torch.float32, tokens=9, num_experts=1, top_k=1)
    rows = reference.sort_by_expert(a.experts, 1)
    out = reference.experts_gate_up_silu_mul(a.x, 3 * a.gate_up, rows, None, clamp)
    gate, up = (3 * a.x @ a.gate_up[0].T).split(40, dim=1)
    assert gate.max() > 1.5 > -1.5 > up.min()
    gate, up = gate.clip(max=1.5), up.clip(-1.5, 1.5)
    assert_near(out, (up + 1) * gate / (1 + torch.exp(-2 * gate)), 1e-5)


@pytest.mark.parametrize("config", [LARGEST, *(config for _, config in GEMM_TABLE)], ids=str)
def test_every_configuration_computes_the_same(config, device):
    a = Inputs(device, DTYPES[0], tokens=33, num_experts=2, top_k=1, hidden=144, intermediate=72)
    rows = experts.sort_by_expert(a.experts, 2, tile=config.tile)
    gated = experts.experts_gate_up_silu_mul(a.x, a.gate_up, rows, config=config)
    expected = reference.experts_gate_up_silu_mul(a.x, a.gate_up, rows)
    assert_near(gated, expected, 2 * TOLERANCE[DTYPES[0]])


def test_both_sizes_of_elements_have_the_same_tiles():
    for pairs in (1, 500, 3000, 9000, 60_000):
        assert gemm_config(pairs, 128, 4).tile == gemm_config(pairs, 128, 2).tile


def test_larger_batches_have_larger_tiles():
    tiles = [gemm_config(8 * tokens, 128).tile for tokens in (1, 64, 256, 512, 1024, 8192)]
    assert tiles == [16, 16, 32, 64, 64, 128]


def test_rows_cut_to_other_tiles_are_refused(device):
    a = Inputs(device, torch.float32)
    rows = experts.sort_by_expert(a.experts, 4, tile=LARGEST.tile)
    with pytest.raises(ValueError, match=r"config.tile is 16, but the rows were cut to 128"):
        experts.experts_gate_up_silu_mul(a.x, a.gate_up, rows, config=SMALL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [48, 1100])
@pytest.mark.parametrize("with_shared", ["nothing", "shared", "gated"])
def test_add_experts(with_shared, hidden, dtype, device):
    a = Inputs(device, dtype, tokens=11, top_k=3, hidden=hidden)
    rows = experts.sort_by_expert(a.experts, 4)
    parts = torch.randn(33, hidden, device=device).to(dtype)
    shared = gate = None
    if with_shared != "nothing":
        shared = torch.randn_like(a.x)
    if with_shared == "gated":
        gate = torch.randn(11, 1, device=device).to(dtype)
    stream = a.residual.clone()
    out = experts.add_experts(parts, a.weights, rows, stream, shared, gate)
    assert out is stream
    expected = reference.add_experts(parts, a.weights, rows, a.residual, shared, gate)
    assert_near(out, expected, 2 * TOLERANCE[dtype])


def layer(a: Inputs, x: Tensor, residual: Tensor, top_k: int) -> Tensor:
    """All operations of a layer, with the tiles for the number of tokens."""
    num_experts = len(a.router)
    routes = experts.route(x, a.router, Routing(num_experts, top_k))
    rows = experts.sort_by_expert(routes.experts, num_experts)
    gated = experts.experts_gate_up_silu_mul(x, a.gate_up, rows)
    parts = experts.experts_down(gated, a.down, rows)
    return experts.add_experts(parts, routes.weights, rows, residual.clone())


@pytest.fixture
def tiles_of_half_precision(monkeypatch):
    """Kernels use the tiles of half precision, which differ in width, for float32 as well."""
    path = "pagewire.worker.ops.triton.experts.gemm.gemm_config"
    monkeypatch.setattr(path, lambda pairs, num_experts, size: gemm_config(pairs, num_experts))


def differing(dtype: torch.dtype, device: torch.device) -> int:
    """The number of 19 tokens whose bits in smaller batches differ from those among 201."""
    a = Inputs(device, dtype, tokens=201, num_experts=5, hidden=160, intermediate=72)
    together = layer(a, a.x, a.residual, 3)
    parts = [slice(token, token + 1) for token in (0, 200)] + [slice(100, 117)]
    pairs = [(layer(a, a.x[part], a.residual[part], 3), together[part]) for part in parts]
    return sum(int((one != other).any(1).sum()) for one, other in pairs)


@pytest.mark.usefixtures("tiles_of_half_precision")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_batch(dtype, device, monkeypatch):
    configs = {gemm_config(3 * tokens, 5) for tokens in (1, 17, 201)}
    assert len({config.block_k for config in configs}) == 2
    if not CUDA:
        monkeypatch.setattr(InterpreterBuilder, "create_dot", in_order)
    assert differing(dtype, device) == 0


@pytest.mark.usefixtures("tiles_of_half_precision")
@pytest.mark.skipif(CUDA, reason="a GPU has one order of sums only")
def test_bits_would_differ_if_the_order_of_sums_did(device, monkeypatch):
    monkeypatch.setattr(InterpreterBuilder, "create_dot", by_tile)
    assert differing(torch.float32, device) > 15


def test_without_tokens_nothing_runs(device):
    a = Inputs(device, torch.float32, tokens=0)
    assert layer(a, a.x, a.residual, 2).shape == (0, 48)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts": 4, "top_k": 5}, "top_k 5 is not in 1 to 4"),
        ({"experts": 6, "groups": 6}, "6 experts do not form 6 groups"),
        ({"experts": 9, "groups": 4}, "9 experts do not form 4 groups"),
        ({"experts": 8, "groups": 4, "top_groups": 5}, "top_groups 5 is not in 1 to 4"),
        ({"experts": 8, "groups": 4, "top_k": 3}, "1 groups have fewer than top_k 3"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Routing(**{"top_k": 1, "scoring": "sigmoid"} | wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_of_tokens_are_in_the_rows_of_their_experts(dtype, device):
    a = Inputs(device, dtype, tokens=19, num_experts=5, top_k=3)
    rows = experts.sort_by_expert(a.experts, 5)
    with poisoned_outputs():
        by_row = copy_rows(a.x, rows)
    assert torch.equal(by_row, a.x[rows.pairs.long() // 3])


@pytest.mark.skipif(not FULL_SIZE, reason="Gluon has no interpreter: a GPU is needed")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("tokens", "k", "features"),
    [(1, 2048, 768), (150, 320, 208), (1500, 768, 2048), (1500, 2048, 768)],
)
def test_hoppers_kernel_has_the_bits_of_the_plain_one(tokens, k, features, gated, device):
    """Experts without rows, with few, and with tiles that are not full; one expert has half.

    The last sizes have more tiles than there are programs.
    """
    sizes = {"tokens": tokens, "num_experts": 9, "top_k": 2}
    if gated:
        a = Inputs(device, torch.bfloat16, hidden=k, intermediate=features, **sizes)
    else:
        a = Inputs(device, torch.bfloat16, hidden=features, intermediate=k, **sizes)
    chosen = torch.randn(tokens, 8, device=device).argsort(1)[:, :2].int()
    chosen[: tokens // 2, 0] = 8
    plain = experts.sort_by_expert(chosen, 9, tile=LARGEST.tile)
    rows = experts.sort_by_expert(chosen, 9, tile=hopper.TILE)
    if gated:
        x, weight = copy_rows(a.x, rows), a.gate_up
        expected = experts.experts_gate_up_silu_mul(a.x, weight, plain, config=LARGEST)
    else:
        weight, of_pairs = a.down, torch.randn(2 * tokens, k, device=device).bfloat16()
        x = of_pairs[rows.pairs]
        expected = experts.experts_down(of_pairs[plain.pairs], weight, plain, config=LARGEST)
    out = torch.full_like(expected, torch.nan)
    hopper.multiply(x, weight, out, rows, gated=gated)
    assert torch.equal(out[rows.rows], expected[plain.rows])


@pytest.mark.skipif(not FULL_SIZE, reason="Gluon has no interpreter: a GPU is needed")
@pytest.mark.parametrize("tokens", [400, 1500])
def test_a_layer_on_hopper_has_the_bits_of_the_plain_kernels(tokens, device, monkeypatch):
    """Kernels follow one another; each may start before the previous one has ended."""
    sizes = {"tokens": tokens, "num_experts": 16, "top_k": 4, "hidden": 1024, "intermediate": 384}
    a = Inputs(device, torch.bfloat16, **sizes)
    routes = Routes(a.experts.contiguous(), a.weights)

    def layer() -> Tensor:
        return experts.experts_add(a.x, routes, 16, a.gate_up, a.down, a.residual.clone())

    assert hopper.is_supported(a.x.dtype, a.gate_up, a.experts.numel())
    out = [layer() for _ in range(5)]
    monkeypatch.setattr(hopper, "is_supported", lambda *_: False)
    expected = layer()
    assert all(torch.equal(each, expected) for each in out)
