"""With `--batch-invariant` the bits of an answer depend only on its request, on a GPU.

Tokens and log probabilities of 64 sequences are compared: alone, eight at a time, and at once among
192 others; in chunks of several sizes; with cached and with shared prefixes; after a preemption.
Without the mode the same comparison must fail.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path

import numpy as np
import pytest
import torch

from pagewire.packing import pack, pack_floats
from pagewire.v1 import worker_pb2 as pb
from support.models.one_answer import (
    SIZES,
    VOCABULARY,
    Answer,
    Wanted,
    answers,
    answers_from_cache,
    preempted_answers,
)
from support.models.step_driver import LocalWorker, StepDriver, local_worker
from support.models.tiny_models import save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

FAMILIES = ["llama", "llama-biased", "mistral", "qwen2", "qwen3"]
SETTINGS = {
    "device": "cuda",
    "num_slots": 264,
    "num_blocks": 20_000,
    "max_model_len": 12_000,
    "worker_max_num_batched_tokens": 8192,
}
COUNT = 40
# Around the ends of tiles of 64 and segments of 256 positions, in prompt and output.
LENGTHS = [1, 2, 17, 30, 63, 64, 65, 200, 230, 255, 256, 257, 300, 511, 513, 700, 1023, 1500]


def drawn(generator: random.Random, length: int, number: int, count: int = COUNT) -> Wanted:
    """A request: greedy, sampled, with filters, with penalties or with biases, by its number."""
    kinds: list[dict] = [
        {},
        {"temperature": 0.9},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.2},
        {
            "temperature": 0.7,
            "min_p": 0.02,
            "bias_ids": pack([5, 900]),
            "biases": pack_floats(np.array([1.5, -2.0], np.float32)),
        },
    ]
    fields = {"top_p": 1.0, "seed": 1000 + number} | kinds[number % len(kinds)]
    # Numbers of likeliest tokens for which several kernels run.
    sampling = pb.SlotSampling(logprobs=(0, 3, 20)[number % 3], **fields)
    prompt = [generator.randrange(VOCABULARY) for _ in range(length)]
    return Wanted(prompt, count, sampling)


def requests() -> tuple[list[Wanted], list[Wanted]]:
    """The 64 compared sequences, and 192 others."""
    generator = random.Random(11)
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(63)] + [9000]
    wanted = [drawn(generator, length, number) for number, length in enumerate(lengths)]
    others = [drawn(generator, 1 + generator.randrange(600), number) for number in range(192)]
    return wanted, others


def different(found: list[Answer], expected: list[Answer]) -> list[int]:
    """The numbers of the sequences whose answers differ in bits."""
    assert len(found) == len(expected)
    pairs = zip(found, expected, strict=True)
    return [number for number, (one, other) in enumerate(pairs) if one != other]


def run(
    folder: Path, check: Callable[[LocalWorker], Coroutine[None, None, None]], **settings: object
) -> None:
    async def on_a_worker() -> None:
        async with local_worker(folder, **(SETTINGS | settings)) as worker:
            await check(worker)
            assert not worker.fatal

    asyncio.run(on_a_worker())


@pytest.mark.parametrize(
    ("family", "dtype", "kv"),
    [
        *((family, dtype, "auto") for family in FAMILIES for dtype in ("bfloat16", "float16")),
        ("llama", "bfloat16", "fp8"),
        ("qwen3", "float16", "fp8"),
    ],
)
def test_bits_do_not_depend_on_the_batch(tmp_path: Path, family: str, dtype: str, kv: str) -> None:
    save_model(tmp_path, family, **SIZES)
    wanted, others = requests()

    async def check(worker: LocalWorker) -> None:
        driver = StepDriver(worker.stream(), worker.limits)
        alone = await answers(driver, wanted, at_once=1)
        assert all(len(answer.tokens) == len(answer.logprobs) == COUNT for answer in alone)
        assert min(min(answer.tokens) for answer in alone) >= 0, "no row has failed"
        assert different(await answers(driver, wanted, at_once=8), alone) == []
        assert different(await answers(driver, wanted, others=others), alone) == []
        for chunk in (64, 512, 8192):
            found = await answers(driver, wanted, others=others, chunk=chunk, run_ahead=3)
            assert different(found, alone) == [], chunk
        assert different(await preempted_answers(driver, wanted, COUNT // 2), alone) == []

    run(tmp_path, check, dtype=dtype, kv_cache_dtype=kv, batch_invariant=True)


def with_prefix(shared: int) -> list[Wanted]:
    """Requests whose first `shared` tokens are the same."""
    generator = random.Random(shared)
    prefix = [generator.randrange(VOCABULARY) for _ in range(shared)]
    own = [drawn(generator, 1 + 3 * number, number) for number in range(64)]
    return [Wanted(prefix + request.prompt, COUNT, request.sampling) for request in own]


@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bits_do_not_depend_on_what_is_cached_or_shared(
    tmp_path: Path, family: str, dtype: str, kv: str
) -> None:
    """Prefixes of whole segments and a part of one, and of more than are read as shared."""
    save_model(tmp_path, family, **SIZES)

    async def check(worker: LocalWorker) -> None:
        assert worker.loaded.backend.prefix_groups
        for shared in (1120, 9216):
            wanted = with_prefix(shared)
            driver = StepDriver(worker.stream(), worker.limits)
            alone = await answers(driver, wanted, at_once=1)
            for grouped in (False, True):
                found = await answers_from_cache(
                    worker.stream(), worker.limits, wanted, shared, grouped=grouped
                )
                assert different(found, alone) == [], f"{shared} shared, grouped: {grouped}"

    run(tmp_path, check, dtype=dtype, kv_cache_dtype=kv, batch_invariant=True)


def test_two_workers_give_the_same_bits(tmp_path: Path) -> None:
    """A request that moves, or continues after a worker was killed, keeps its answer.

    The second worker measures its GEMMs again, and may choose other algorithms.
    """
    save_model(tmp_path, "qwen3", **SIZES)
    wanted, _ = requests()
    found: list[list[Answer]] = []

    async def check(worker: LocalWorker) -> None:
        driver = StepDriver(worker.stream(), worker.limits)
        found.append(await answers(driver, wanted))

    run(tmp_path, check, dtype="bfloat16", batch_invariant=True)
    run(tmp_path, check, dtype="bfloat16", batch_invariant=True, num_slots=100)
    assert different(*found) == []


def test_without_the_mode_bits_do_depend_on_the_batch(tmp_path: Path) -> None:
    """The negative control: shares of attention are cut anywhere, and GEMMs have several orders."""
    save_model(tmp_path, "qwen3", **SIZES)
    wanted, others = requests()

    async def check(worker: LocalWorker) -> None:
        driver = StepDriver(worker.stream(), worker.limits)
        alone = await answers(driver, wanted, at_once=1)
        assert different(await answers(driver, wanted, at_once=1), alone) == []
        assert different(await answers(driver, wanted, others=others), alone) != []

    run(tmp_path, check, dtype="bfloat16")
