"""A worker with a KV cache in FP8: quality, chunks, graphs and blocks in the host's memory."""

import random
from pathlib import Path

import pytest

from support.models.host_graphs import with_host_graphs
from support.models.saved_blocks import run_saved_and_loaded
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, save_model

COUNT = 24
PROMPTS = [[(7 * i + start) % 199 for i in range(start + 5)] for start in (0, 11, 40)]
FP8 = {"kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("variant", ["qwen3", "gemma2"])
async def test_chunks_and_graphs_change_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    save_model(tmp_path, variant)
    as_graphs = with_host_graphs(monkeypatch)

    async def tokens(adapt=lambda loaded: loaded, **options: int) -> list[list[int]]:
        async with local_worker(tmp_path, adapt, **FP8) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            found = await driver.run([Sequence(prompt, COUNT) for prompt in PROMPTS], **options)
            assert not worker.fatal
            return found

    whole = await tokens()
    assert len({tuple(found) for found in whole}) == len(PROMPTS)
    assert await tokens(chunk=9, run_ahead=2) == whole
    assert await tokens(as_graphs, chunk=9, run_ahead=2) == whole


async def test_saved_blocks_come_back_with_their_scales(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    generator = random.Random(3)
    ours, theirs = ([generator.randrange(VOCAB) for _ in range(n)] for n in (40, 38))
    # K and V, layers, KV heads, tokens, values and a scale, each in bytes.
    block_bytes = 2 * 3 * 2 * 16 * (16 + 4)
    async with local_worker(tmp_path, host_memory_gb=6.5 * block_bytes / 1e9, **FP8) as worker:
        assert worker.limits.host_blocks == 6
        assert worker.loaded.backend.kv_cache_bytes == worker.limits.num_blocks * block_bytes
        back, other, strange = await run_saved_and_loaded(worker, ours, theirs)
        assert not worker.fatal
    async with local_worker(tmp_path, **FP8) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        cold = await driver.run([Sequence(ours, len(back)), Sequence(theirs, len(other))])
    assert [back, other] == cold
    assert strange != back, "what was not loaded was not needed"
