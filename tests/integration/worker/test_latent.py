"""Workers of models with latent attention: blocks are shared, copied, saved; graphs and dummies."""

import random
from pathlib import Path

import pytest

from support.models import host_graphs
from support.models.copied_start import BLOCK_SIZE, run_copied_start
from support.models.host_graphs import with_host_graphs
from support.models.saved_blocks import COUNT, run_saved_and_loaded
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, greedy_tokens, save_model

BLOCK_BYTES = 3 * 16 * 48 * 4  # layers, tokens, values, bytes


def draw(*lengths: int) -> list[list[int]]:
    generator = random.Random(3)
    return [[generator.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("variant", ["deepseek-v2-lite", "deepseek-v3"])
async def test_a_sequence_that_starts_with_a_copied_block(tmp_path: Path, variant: str) -> None:
    """Its other block is shared with the sequence that wrote it."""
    model = save_model(tmp_path, variant)
    (ours,) = draw(45)
    theirs = [*ours[:-1], (ours[-1] + 1) % VOCAB]
    async with local_worker(tmp_path, block_size=BLOCK_SIZE) as worker:
        outputs = await run_copied_start(worker, ours, theirs)
    assert outputs == (greedy_tokens(model, ours, 11), greedy_tokens(model, theirs, 9))
    assert outputs[0][:9] != outputs[1]


async def test_saved_blocks_come_back(tmp_path: Path) -> None:
    model = save_model(tmp_path, "deepseek-v2")
    ours, theirs = draw(40, 38)
    async with local_worker(tmp_path, host_memory_gb=6.5 * BLOCK_BYTES / 1e9) as worker:
        assert worker.limits.host_blocks == 6
        back, other, strange = await run_saved_and_loaded(worker, ours, theirs)
        assert not worker.fatal
    assert back == greedy_tokens(model, ours, COUNT)
    assert other == greedy_tokens(model, theirs, COUNT)
    assert strange != back, "what was not loaded was not needed"


@pytest.mark.parametrize(("variant", "grouped"), [("deepseek-v2", False), ("llama", True)])
async def test_a_worker_says_whether_it_reads_prefix_groups(
    tmp_path: Path, variant: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, variant)
    monkeypatch.setattr(host_graphs.HostGraphBackend, "prefix_groups", True)
    adapt = with_host_graphs(monkeypatch)
    async with local_worker(tmp_path, adapt, num_slots=2, num_blocks=8) as worker:
        assert worker.loaded.backend.prefix_groups == grouped


async def test_dummy_weights_generate(tmp_path: Path) -> None:
    save_model(tmp_path, "deepseek-v3")
    (tmp_path / "model.safetensors").unlink()
    async with local_worker(tmp_path, load_format="dummy") as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        outputs = await driver.run([Sequence(prompt, 9) for prompt in draw(5, 20)], chunk=7)
        assert [len(output) for output in outputs] == [9, 9]
        assert not worker.fatal
