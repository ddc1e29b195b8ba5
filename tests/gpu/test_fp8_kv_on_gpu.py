"""A KV cache in FP8 on a GPU: graphs, shared prefixes and blocks in the host's memory."""

import asyncio
import random
from pathlib import Path

import pytest
import torch

from gpu.test_shared_prefixes_on_gpu import INNER, MEMBERS, OUTER, generate
from support.models.saved_blocks import run_saved_and_loaded
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

COUNT = 40
PROMPTS = [[(7 * i + start) % 199 for i in range(start + 5)] for start in (0, 11, 40, 300)]
SETTINGS = {"device": "cuda", "dtype": "bfloat16", "num_slots": 9, "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma2"])
def test_a_sequence_that_runs_again_has_the_same_tokens(tmp_path: Path, variant: str) -> None:
    """In graphs of decode steps and of chunks; the plain cache yields mostly the same tokens."""
    save_model(tmp_path, variant)

    async def tokens(**settings: object) -> list[list[int]]:
        async with local_worker(tmp_path, **(SETTINGS | settings)) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            runs = [
                await driver.run([Sequence(prompt, COUNT) for prompt in PROMPTS], run_ahead=3)
                for _ in range(2)
            ]
            assert runs[0] == runs[1]
            assert not worker.fatal
            return runs[0]

    found = asyncio.run(tokens())
    plain = asyncio.run(tokens(kv_cache_dtype="auto"))
    assert len({tuple(one) for one in found}) == len(PROMPTS)
    assert sum(one[0] == other[0] for one, other in zip(found, plain, strict=True)) >= 3


def test_grouped_decodes_are_like_those_alone(tmp_path: Path) -> None:
    """In float32, where only few keys and values may be rounded differently."""
    save_model(tmp_path, "llama")
    generator = random.Random(5)

    def draw(count: int) -> list[int]:
        return [generator.randrange(VOCAB) for _ in range(count)]

    outer, inner = draw(16 * OUTER), draw(16 * (INNER - OUTER))
    prompts = [outer + inner + draw(3)]
    prompts += [outer + (inner if slot > 3 else []) + draw(5 + slot) for slot in MEMBERS]

    async def check() -> None:
        settings = SETTINGS | {"dtype": "float32", "num_blocks": 128}
        async with local_worker(tmp_path, **settings) as worker:
            grouped = await generate(worker.stream(), prompts)
            assert not worker.fatal
        async with local_worker(tmp_path, **settings) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            alone = [
                (await driver.run([Sequence(prompt, len(tokens))]))[0]
                for prompt, tokens in zip(prompts, grouped, strict=True)
            ]
        assert sum(one == other for one, other in zip(grouped, alone, strict=True)) >= 6

    asyncio.run(check())


@pytest.mark.parametrize("ops", ["torch", "triton"])
def test_loaded_blocks_equal_saved_blocks(tmp_path: Path, ops: str) -> None:
    save_model(tmp_path, "llama")
    generator = random.Random(3)
    ours, theirs = ([generator.randrange(VOCAB) for _ in range(n)] for n in (40, 38))

    async def check() -> None:
        async with local_worker(tmp_path, ops=ops, host_memory_gb=0.001, **SETTINGS) as worker:
            first = await run_saved_and_loaded(worker, ours, theirs)
            back, other, wrong = await run_saved_and_loaded(worker, ours, theirs)
            driver = StepDriver(worker.stream(), worker.limits)
            cold = await driver.run([Sequence(ours, len(back))])
            assert not worker.fatal
        assert first == (back, other, wrong)
        assert wrong != back
        assert cold == [back]

    asyncio.run(check())
