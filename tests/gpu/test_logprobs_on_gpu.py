"""Log probabilities of the graph backend, from graph replays and from eager steps."""

import asyncio
import random
from pathlib import Path

import pytest
import torch
from triton import knobs

from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.startup.triton_hooks import on_compilation
from support.models.logprob_checks import assert_logprobs
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, log_probabilities, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

KERNELS = {"_top_kernel", "_logprobs_kernel"}
# For each sequence: the length of its prompt, and the number of top log probabilities.
WANTED = [(1, 0), (5, None), (16, 3), (17, 20), (33, None), (80, 1)]
COUNT = 40


def sequences(**fields: float) -> list[Sequence]:
    generator = random.Random(7)
    return [
        Sequence(
            [generator.randrange(VOCAB) for _ in range(length)],
            COUNT,
            sampling=pb.SlotSampling(top_p=1.0, seed=length, logprobs=top, **fields),
        )
        for length, top in WANTED
    ]


@pytest.mark.parametrize("run_ahead", [1, 4])
@pytest.mark.parametrize("variant", ["llama", "qwen3-tied"])
def test_values_equal_those_of_transformers(tmp_path: Path, variant: str, run_ahead: int) -> None:
    model = save_model(tmp_path, variant, initializer_range=0.1)
    late: list[str] = []

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "float32", "num_slots": 8}
        async with local_worker(tmp_path, **settings) as worker:
            on_compilation(late.append)
            driver = StepDriver(worker.stream(), worker.limits)
            drawn = sequences(temperature=1.3)
            await driver.run(drawn, chunk=7, run_ahead=run_ahead)
            for (_, top), sequence in zip(WANTED, drawn, strict=True):
                if top is None:
                    assert not sequence.logprobs
                    continue
                reference = log_probabilities(model, sequence.tokens, sequence.output)
                assert_logprobs(sequence.logprobs, sequence.output, reference, top)
            assert not worker.fatal

    try:
        asyncio.run(check())
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not KERNELS & {name.rpartition(".")[2] for name in late}, "compiled while serving"


def test_prompts_have_the_values_of_transformers(tmp_path: Path) -> None:
    """Beside decode rows, in chunks, and without compiling a kernel while serving."""
    model = save_model(tmp_path, "qwen3-tied", initializer_range=0.1)
    late: list[str] = []

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "float32", "num_slots": 8}
        async with local_worker(tmp_path, **settings) as worker:
            on_compilation(late.append)
            driver = StepDriver(worker.stream(), worker.limits)
            scored = sequences()
            for (_, top), sequence in zip(WANTED, scored, strict=True):
                sequence.prompt_top = top
            await driver.run(scored, chunk=7, run_ahead=4)
            for (_, top), sequence in zip(WANTED, scored, strict=True):
                targets = sequence.tokens[1:]
                if top is None or not targets:
                    assert not sequence.prompt_logprobs
                    continue
                reference = log_probabilities(model, sequence.tokens[:1], targets)
                assert_logprobs(sequence.prompt_logprobs, targets, reference, top)
            assert not worker.fatal

    try:
        asyncio.run(check())
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not KERNELS & {name.rpartition(".")[2] for name in late}, "compiled while serving"


def test_a_greedy_token_is_the_first_of_its_top_logprobs(tmp_path: Path) -> None:
    """Also in bfloat16, and with equal values to the last bit."""
    save_model(tmp_path, "llama", initializer_range=0.05)

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "bfloat16", "num_slots": 8}
        async with local_worker(tmp_path, **settings) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            greedy = sequences()
            await driver.run(greedy, chunk=7, run_ahead=4)
            for (_, top), sequence in zip(WANTED, greedy, strict=True):
                if not top:
                    continue
                for token, (own, ids, values) in zip(
                    sequence.output, sequence.logprobs, strict=True
                ):
                    assert (ids[0], values[0]) == (token, own)

    asyncio.run(check())
