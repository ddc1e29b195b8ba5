"""Tiles measured at the start of a worker: it uses the fastest ones with the table's bits."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from pagewire.worker.ops.triton.experts import config as configs
from pagewire.worker.ops.triton.experts import hopper, tuning
from pagewire.worker.ops.triton.experts.config import GEMM_TABLE, GemmConfig, gemm_config
from pagewire.worker.startup import tuning as startup
from support.kernels.comparison import CUDA
from support.kernels.ordered_dot import in_order

EXPERTS, TOP_K = 3, 2


@pytest.fixture
def layers(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    monkeypatch.setattr(configs, "_measured", {})
    if not CUDA:
        monkeypatch.setattr(InterpreterBuilder, "create_dot", in_order)
    torch.manual_seed(0)
    gate_up = torch.randn(EXPERTS, 48, 32, device=device).to(torch.float16)
    return [(gate_up, torch.randn(EXPERTS, 32, 24, device=device).to(torch.float16))] * 2


def timer(times: Iterator[float]) -> Callable[[Callable[[], Tensor]], float]:
    """A clock that returns `times`, one for each configuration, and runs the timed function."""

    def microseconds(run: Callable[[], Tensor]) -> float:
        assert run().shape == (4, 32)
        return next(times)

    return microseconds


@pytest.mark.parametrize(("faster", "changed"), [(1.0, 0), (0.99, 0), (0.9, 1)])
def test_clearly_faster_tiles_are_used(
    layers: list[tuple[Tensor, Tensor]], faster: float, changed: int
) -> None:
    usual = gemm_config(4, EXPERTS)
    wanted = tuning.candidates(usual)[2]
    times = iter([1.0, 1.0, 1.0, faster, *[1.0] * 20])
    assert tuning.choose_tiles(layers, TOP_K, [2], timer(times)) == changed
    assert gemm_config(4, EXPERTS) == (wanted if changed else usual)
    assert gemm_config(6, EXPERTS) == GEMM_TABLE[0][1]


def test_tiles_that_do_not_fit_or_have_other_bits_are_passed_over(
    layers: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, run = gemm_config(4, EXPERTS), tuning.experts_down

    def fail(x: Tensor, weight: Tensor, rows: object, *, config: GemmConfig) -> Tensor:
        if config.stages != usual.stages:
            raise RuntimeError("too little shared memory")
        return run(x, weight, rows, config=config) + (config.rows != usual.rows)

    monkeypatch.setattr(tuning, "experts_down", fail)
    times = iter([10.0, *[1.0] * 20])
    tuning.choose_tiles(layers, TOP_K, [2], timer(times))
    chosen = gemm_config(4, EXPERTS)
    assert (chosen.stages, chosen.rows) == (usual.stages, usual.rows)


@pytest.mark.parametrize("usual", [config for _, config in GEMM_TABLE], ids=str)
def test_candidates_are_near_the_usual_tiles(usual: GemmConfig) -> None:
    found = tuning.candidates(usual)
    assert usual not in found
    assert len({*found}) == len(found) >= 5
    assert all(usual.tile // 2 <= config.tile <= 2 * usual.tile for config in found)


@pytest.mark.parametrize(
    ("bias", "clamp", "measured"),
    [(False, None, [1, 2, 3]), (True, None, [1, 2, 3, 4, 5]), (False, (1.7, 7.0), [1, 2, 3, 4, 5])],
)
def test_numbers_of_tokens_that_hoppers_kernel_computes_are_not_measured(
    layers: list[tuple[Tensor, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    bias: bool,
    clamp: tuple[float, float] | None,
    measured: list[int],
) -> None:
    experts = SimpleNamespace(top_k=TOP_K, bias=bias, clamp=clamp)
    weights = [SimpleNamespace(gate_up=one, down=two, router=one) for one, two in layers]
    decoder: Any = SimpleNamespace(
        config=SimpleNamespace(experts=experts), weights=SimpleNamespace(layers=weights)
    )
    given: list[list[int]] = []
    monkeypatch.setattr(startup, "_row_counts", lambda limits: [1, 2, 3, 4, 5])
    monkeypatch.setattr(startup, "choose_tiles", lambda *args: given.append(args[2]) or 0)
    monkeypatch.setattr(hopper, "is_supported", lambda dtype, weight, pairs: pairs >= 4 * TOP_K)
    startup.choose_expert_tiles(decoder, limits=None)
    assert given == [measured]
