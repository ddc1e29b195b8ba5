"""Graphs of families that are not of Llama's form generate the tokens of transformers."""

import random
from pathlib import Path

import pytest
import torch

from support.models.host_graphs import with_host_graphs
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, greedy_tokens, save_model

COUNT = 24
WINDOWED = ["gemma2", "gemma3", "cohere2", "olmo3"]
WITH_EXPERTS = ["qwen3-moe-mixed", "qwen2-moe", "olmoe", "glm4-moe", "gpt-oss"]
WITH_LATENT_ATTENTION = ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real graphs are tested there")
@pytest.mark.parametrize("variant", [*WINDOWED, *WITH_EXPERTS, *WITH_LATENT_ATTENTION])
async def test_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path, variant)
    generator = random.Random(5)
    prompts = [[generator.randrange(VOCAB) for _ in range(length)] for length in (3, 30, 41)]
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in prompts]
    settings = {"num_slots": 4, "worker_max_num_batched_tokens": 64, "num_blocks": 40}
    async with local_worker(tmp_path, with_host_graphs(monkeypatch), **settings) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        sequences = [Sequence(prompt, COUNT) for prompt in prompts]
        assert await driver.run(sequences, chunk=9, run_ahead=3) == expected
