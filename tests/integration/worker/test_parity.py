"""The worker generates the tokens of transformers, for every family and any cut of a batch."""

import random
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pagewire.v1 import worker_pb2 as pb
from support.models.adjusted import ADJUSTED, check_adjusted_tokens
from support.models.copied_start import BLOCK_SIZE, run_copied_start
from support.models.host_graphs import with_host_graphs
from support.models.quantized_experts import save_mxfp4
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import (
    VARIANTS,
    VISION_VARIANTS,
    VOCAB,
    greedy_tokens,
    save_model,
    save_vision_model,
)

LENGTHS = (1, 5, 16, 33, 80)
COUNT = 64


def prompts() -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("variant", VARIANTS)
async def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    model = save_model(tmp_path, variant)
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == len(LENGTHS)
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)

        whole = await driver.run([Sequence(prompt, COUNT) for prompt in prompts()])
        assert whole == expected

        chunked = [Sequence(prompt, COUNT) for prompt in prompts()]
        assert await driver.run(chunked, chunk=7, run_ahead=3) == expected

        resumed = [
            Sequence(prompt + tokens[:20], COUNT - 20, generated=20)
            for prompt, tokens in zip(prompts(), expected, strict=True)
        ]
        assert await driver.run(resumed, chunk=50) == [tokens[20:] for tokens in expected]


async def test_experts_in_four_bits(tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path, intermediate_size=96)
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == len(LENGTHS)
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        sequences = [Sequence(prompt, COUNT) for prompt in prompts()]
        assert await driver.run(sequences, chunk=7, run_ahead=3) == expected


@pytest.mark.parametrize("graphs", [False, True])
async def test_blocks_behind_the_window_are_used_for_other_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    adapt = with_host_graphs(monkeypatch) if graphs else lambda loaded: loaded
    model = save_model(tmp_path, "mistral-window")
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in prompts()]
    whole = sum(-(-(length + COUNT) // 16) for length in LENGTHS)
    sizes = {"num_blocks": whole * 2 // 3, "block_size": 16}
    async with local_worker(tmp_path, adapt, **sizes) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        for chunk in (7, 40):
            sequences = [Sequence(prompt, COUNT) for prompt in prompts()]
            assert await driver.run(sequences, chunk=chunk, free=True) == expected
            assert all(sequence.freed for sequence in sequences)


@pytest.mark.parametrize("model_type", VISION_VARIANTS)
async def test_the_text_part_of_a_multi_modal_model(tmp_path: Path, model_type: str) -> None:
    model = save_vision_model(tmp_path, model_type)
    names = load_file(tmp_path / "model.safetensors")
    assert any("vision" in name for name in names)
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == len(LENGTHS)
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        sequences = [Sequence(prompt, COUNT) for prompt in prompts()]
        assert await driver.run(sequences, chunk=30) == expected


async def test_adjusted_greedy_tokens_are_those_of_the_formula(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama", initializer_range=0.05)
    async with local_worker(tmp_path, num_slots=len(ADJUSTED) + 1) as worker:
        await check_adjusted_tokens(worker, model)


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
async def test_repetition_penalty_is_that_of_transformers(tmp_path: Path, variant: str) -> None:
    model, penalty = save_model(tmp_path, variant), 1.2
    expected = [
        greedy_tokens(model, prompt, COUNT, repetition_penalty=penalty) for prompt in prompts()
    ]
    sampling = pb.SlotSampling(top_p=1.0, repetition_penalty=penalty)
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        sequences = [Sequence(prompt, COUNT, sampling=sampling) for prompt in prompts()]
        assert await driver.run(sequences, chunk=30) == expected


async def test_a_sequence_that_starts_with_a_copied_block(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")
    ours = prompts()[4][:45]
    theirs = [*ours[:-1], (ours[-1] + 1) % VOCAB]
    async with local_worker(tmp_path, block_size=BLOCK_SIZE) as worker:
        outputs = await run_copied_start(worker, ours, theirs)
    assert outputs == (greedy_tokens(model, ours, 11), greedy_tokens(model, theirs, 9))
    assert outputs[0][:9] != outputs[1]
