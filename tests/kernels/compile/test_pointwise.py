"""The pointwise, sampling and linear kernels compile for Hopper as intended, on any machine.

The launches are compiled in a separate process, because Triton's interpreter, which other tests
use, replaces the compiler. Run as a script, this file prints the launches as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.limits import MAX_BIASES, MAX_STOP_IDS
from pagewire.worker.ops.contract.sampling import Adjustments, SamplingState, TokenMasks
from pagewire.worker.ops.contract.step import START_VALUES
from support.kernels.clean_process import report_of

SHARED_LIMIT = 227 * 1024
HIDDEN = 4096


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norms(tokens: int) -> None:
    from pagewire.worker.ops.triton.rowwise import norm

    x, weight = meta(tokens, HIDDEN), meta(HIDDEN)
    norm.rms_norm(x, weight, 1e-6)
    norm.rms_norm(x, meta(HIDDEN, dtype=torch.float32), 1e-6)
    norm.layer_norm(x, weight, weight, 1e-6)


def activations(tokens: int) -> None:
    from pagewire.worker.ops.triton.rowwise import activation

    activation.silu_mul(meta(tokens, 2 * HIDDEN))
    activation.silu_mul(meta(tokens, 2 * HIDDEN), meta(tokens, HIDDEN), 1e-6)
    activation.activate(meta(tokens, 2 * HIDDEN), "gelu_tanh", gated=True)
    activation.activate(meta(tokens, HIDDEN), "gelu", gated=False)
    activation.soft_cap(meta(tokens, HIDDEN), 30.0)


def gemms(tokens: int) -> None:
    """GEMMs of Llama-3.1-8B, with the kernels of the table."""
    from pagewire.worker.ops.triton import linear

    x, norm = meta(tokens, HIDDEN), meta(HIDDEN)
    linear.norm_linear(x, norm, 1e-6, meta(6144, HIDDEN), meta(6144))
    linear.linear_add(x, meta(HIDDEN, HIDDEN), x)
    linear.norm_gate_up_silu_mul(x, None, 1e-6, meta(28672, HIDDEN))


def draws(rows: int) -> None:
    from pagewire.worker.ops.triton import sampling
    from pagewire.worker.ops.triton.logprobs import logprobs

    logits, state = meta(rows, 128256), meta_state(rows)
    for given in (state, replace(state, masks=meta_masks(rows, 128256))):
        sampling.sample(logits, given, filtered=False)
        sampling.sample(logits, given)
    logprobs(logits, meta(rows, dtype=torch.int32), 20)


def masks(rows: int) -> None:
    from pagewire.worker.ops.triton import masks

    slots, held = meta(rows, dtype=torch.int32), meta(512, 4768, dtype=torch.int32)
    longs = meta(512, dtype=torch.int64)
    masks.await_masks(longs, slots[:32], longs[:32])
    masks.fetch_masks(held, slots[:32], held)
    masks.note_time(longs, slots)


def ends(rows: int) -> None:
    from pagewire.worker.ops.triton import step

    state, slots = meta_state(64), meta(rows, dtype=torch.int32)
    step.gather_sampling(state, slots, slots)
    step.end_decode(slots, meta(rows, HIDDEN), slots, slots, state.adjustments)


def changes(rows: int) -> None:
    from pagewire.worker.ops.triton import step

    step.start_slots(meta(rows, START_VALUES, dtype=torch.int32), meta_state(64))
    step.write_tables(meta(rows, 3, dtype=torch.int32), meta(65, 512, dtype=torch.int32))


def drafts(rows: int) -> None:
    from pagewire.worker.ops.contract.drafts import TokenHistory
    from pagewire.worker.ops.triton.drafts import begin, end

    slots = meta(65, dtype=torch.int32)
    known, drafts = meta(65, 10256, dtype=torch.int32), meta(65, 15, dtype=torch.int32)
    predictions = meta(65, 4, dtype=torch.int32)
    history = TokenHistory(known, slots, slots, drafts, slots, slots, predictions, slots, 2048)
    inputs, tables = meta(6, rows, dtype=torch.int32), meta(65, 512, dtype=torch.int32)
    _, located = begin.begin_drafted(inputs, meta(128256, HIDDEN), history, tables)
    given = (located.indices, meta(rows, HIDDEN), located.slots, inputs[1], history, slots)
    end.end_drafted(*given)
    end.end_drafted(*given, meta_state(65).adjustments)


def meta_state(rows: int) -> SamplingState:
    dtypes = {"seed": torch.int64, **dict.fromkeys(("temperature", "top_p", "min_p"), torch.float)}
    tensors = {
        field.name: meta(rows, dtype=dtypes.get(field.name, torch.int32))
        for field in fields(SamplingState)
        if field.name not in ("adjustments", "masks")
    }
    ints = meta(rows, dtype=torch.int32)
    adjustments = Adjustments(
        kinds=ints,
        slots=ints,
        token_counts=meta(64, 128256, dtype=torch.int16),
        penalties=meta(64, 3, dtype=torch.float),
        bias_ids=meta(64, MAX_BIASES, dtype=torch.int32),
        biases=meta(64, MAX_BIASES, dtype=torch.float),
    )
    stops = meta(rows, MAX_STOP_IDS, dtype=torch.int32)
    return SamplingState(**tensors | {"stop_token_ids": stops, "adjustments": adjustments})


def meta_masks(rows: int, vocabulary: int) -> TokenMasks:
    words = meta(64, vocabulary // 32, dtype=torch.int32)
    return TokenMasks(meta(rows, dtype=torch.int32), words)


def block_copies(count: int) -> None:
    from pagewire.worker.ops.triton import blocks

    numbers = meta(count, dtype=torch.int32)
    device, host = meta(64, 4096, 16384), meta(4096, 64, 16384).transpose(0, 1)
    blocks.copy_blocks(device, numbers, host, numbers)
    blocks.copy_blocks(host, numbers, device, numbers)


CASES: dict[str, tuple[Callable[[int], None], int]] = {
    "norms of one token": (norms, 1),
    "norms": (norms, 4096),
    "activation": (activations, 4096),
    "GEMMs of one token": (gemms, 1),
    "GEMMs of 2 tokens": (gemms, 2),
    "GEMMs of 16 tokens": (gemms, 16),
    "draws": (draws, 8),
    "draws of many rows": (draws, 512),
    "masks": (masks, 64),
    "ends of a step": (ends, 8),
    "changes of slots": (changes, 32),
    "drafts": (drafts, 16),
    "block copies": (block_copies, 5),
}


def compile_cases() -> dict[str, list[dict]]:
    """Compile the launches of every case; return the tested counts."""
    from pagewire.worker.ops.triton import adjustments, linear, sampling
    from pagewire.worker.ops.triton import logprobs as logprobs_module
    from pagewire.worker.ops.triton import sampling_filters as filters
    from pagewire.worker.ops.triton.rowwise import activation, norm
    from support.kernels.cross_compile import Launch, counts_of_cases

    sampling.multiprocessors = lambda device: 132
    for module in (activation, adjustments, filters, linear, logprobs_module, norm, sampling):
        module.dependent_launch = lambda device: True

    def count(launch: Launch) -> dict[str, Any]:
        return {
            "wide_loads": sum(".v4" in line for line in loads(launch.ptx)),
            "volatile_loads": launch.count("ld.volatile.global"),
            "async_copies": launch.count("cp.async.cg.shared.global"),
            "matrix_instructions": launch.count("wgmma.mma_async") + launch.count("mma.sync"),
            "waits": launch.count("griddepcontrol.wait"),
            "loads_before_wait": len(loads(launch.ptx.split("griddepcontrol.wait")[0])),
            "resident": launch.resident,
            "reduced": launch.reduced,
        }

    return counts_of_cases(CASES, count)


def loads(ptx: str) -> list[str]:
    kinds = "ld.global", "ld.volatile.global"
    return [line for line in ptx.splitlines() if any(kind in line for kind in kinds)]


@pytest.fixture(scope="module")
def launches() -> dict[str, list[dict]]:
    return report_of(Path(__file__))


@pytest.mark.parametrize("case", CASES)
def test_fits_the_multiprocessor(case, launches):
    for launch in launches[case]:
        assert launch["shared"] <= SHARED_LIMIT
        assert launch["spilled"] == 0, launch["kernel"]


@pytest.mark.parametrize(
    "case",
    sorted(
        CASES.keys() - {"block copies", "changes of slots", "drafts", "ends of a step", "masks"}
    ),
)
def test_waits_for_its_predecessor(case, launches):
    assert all(launch["waits"] == 1 for launch in launches[case])


@pytest.mark.parametrize("case", CASES)
def test_loads_are_16_bytes_wide(case, launches):
    for launch in launches[case]:
        small_tables_only = (
            "_choose_kernel",
            "_threshold_kernel",
            "_gather_kernel",
            "_start_kernel",
            "_write_kernel",
            "_locate_kernel",
            "_await_kernel",
            "_time_kernel",
        )
        if launch["kernel"] not in small_tables_only:
            assert launch["wide_loads"] + launch["async_copies"] > 0, launch["kernel"]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("GEMMs")])
def test_weights_are_loaded_before_the_wait(case, launches):
    kernels = ("_vector_kernel", "_skinny_kernel")
    found = [launch for launch in launches[case] if launch["kernel"] in kernels]
    assert found
    for launch in found:
        assert launch["loads_before_wait"] > 0, launch["kernel"]


def test_one_kernel_copies_blocks_either_way_16_bytes_at_a_time(launches):
    copies = launches["block copies"]
    assert [launch["kernel"] for launch in copies] == ["_copy_kernel"] * 2
    # 4096 values of 2 bytes by 128 threads.
    assert [launch["wide_loads"] for launch in copies] == [4, 4]


def test_masks_are_fetched_16_bytes_at_a_time(launches):
    by_kernel = {launch["kernel"]: launch for launch in launches["masks"]}
    # 8192 words of 4 bytes by 512 threads.
    assert by_kernel["_fetch_kernel"]["wide_loads"] == 4
    # Other loads may return what a cache holds since an earlier step.
    assert by_kernel["_fetch_kernel"]["volatile_loads"] == 4
    assert by_kernel["_await_kernel"]["volatile_loads"] > 0


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("draws")])
def test_draws_fill_the_multiprocessor_with_and_without_masks(case, launches):
    from pagewire.worker.ops.triton.sampling import PROGRAMS_PER_MULTIPROCESSOR

    resident = [
        launch["resident"] for launch in launches[case] if launch["kernel"] == "_draw_kernel"
    ]
    assert len(resident) == 4
    assert min(resident) >= PROGRAMS_PER_MULTIPROCESSOR


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("draws")])
def test_masks_do_not_change_the_order_of_sums(case, launches):
    """Else the bits of a row would depend on whether another row of its batch has a mask."""
    found = [
        (launch["kernel"], launch["reduced"])
        for launch in launches[case]
        if launch["kernel"] in ("_search_kernel", "_draw_kernel")
    ]
    half = len(found) // 2
    assert half == 10  # eight steps of the search and two draws
    assert all(types for _, types in found)
    assert found[:half] == found[half:]


def test_skinny_gemms_run_on_tensor_cores(launches):
    skinny = [x for x in launches["GEMMs of 16 tokens"] if x["kernel"] == "_skinny_kernel"]
    assert len(skinny) == 3
    assert all(
        launch["matrix_instructions"] > 0 and launch["async_copies"] > 0 for launch in skinny
    )


if __name__ == "__main__":
    print(json.dumps(compile_cases()))
