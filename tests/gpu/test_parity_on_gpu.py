"""The graph backend in float32 on a GPU generates the tokens of transformers on the CPU."""

import asyncio
import random
from pathlib import Path

import pytest
import torch

from support.models.adjusted import ADJUSTED, check_adjusted_tokens
from support.models.copied_start import BLOCK_SIZE, run_copied_start
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VARIANTS, VOCAB, greedy_tokens, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

LENGTHS = (1, 5, 15, 16, 17, 33, 80)
COUNT = 64


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, variant: str) -> None:
    model = save_model(tmp_path, variant)
    generator = random.Random(8)  # no variant's two likeliest tokens are nearer than 1e-4
    prompts = [[generator.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in prompts]

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "float32", "num_slots": 9}
        async with local_worker(tmp_path, **settings) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            whole = await driver.run([Sequence(prompt, COUNT) for prompt in prompts])
            assert whole == expected
            chunked = [Sequence(prompt, COUNT) for prompt in prompts]
            assert await driver.run(chunked, chunk=7, run_ahead=3) == expected
            alone = await driver.run([Sequence(prompts[4], COUNT)], run_ahead=4)
            assert alone == [expected[4]]
            assert not worker.fatal

    asyncio.run(check())


def test_blocks_behind_the_window_are_used_for_other_sequences(tmp_path: Path) -> None:
    """Graphs read tables in which entries became 0, and blocks that another sequence overwrote."""
    model = save_model(tmp_path, "mistral-window")
    generator = random.Random(8)
    prompts = [[generator.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in prompts]
    whole = sum(-(-(length + COUNT) // 16) for length in LENGTHS)

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "float32", "num_slots": 9, "block_size": 16}
        async with local_worker(tmp_path, num_blocks=whole * 2 // 3, **settings) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            for chunk in (7, 40):
                sequences = [Sequence(prompt, COUNT) for prompt in prompts]
                assert await driver.run(sequences, chunk=chunk, free=True) == expected
                assert all(sequence.freed for sequence in sequences)
            assert not worker.fatal

    asyncio.run(check())


def test_a_sequence_starts_with_a_copied_block(tmp_path: Path) -> None:
    """The step copies the block before its graphs are launched."""
    model = save_model(tmp_path, "llama")
    generator = random.Random(3)
    ours = [generator.randrange(VOCAB) for _ in range(45)]
    theirs = [*ours[:-1], (ours[-1] + 1) % VOCAB]

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "float32", "num_slots": 9}
        async with local_worker(tmp_path, block_size=BLOCK_SIZE, **settings) as worker:
            outputs = await run_copied_start(worker, ours, theirs)
            assert outputs == (greedy_tokens(model, ours, 11), greedy_tokens(model, theirs, 9))
            assert not worker.fatal

    asyncio.run(check())


def test_greedy_tokens_with_penalties_and_biases_follow_the_formula(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama", initializer_range=0.05)

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "float32", "num_slots": len(ADJUSTED) + 1}
        async with local_worker(tmp_path, **settings) as worker:
            await check_adjusted_tokens(worker, model)
            assert not worker.fatal

    asyncio.run(check())
