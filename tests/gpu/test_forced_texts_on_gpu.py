"""Outputs that a benchmark forces, in CUDA graphs: the device replaces tokens by recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagewire.v1 import worker_pb2 as pb
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

PROMPTS = [[(7 * i + j) % VOCAB for j in range(20 + i)] for i in range(5)]
TEXTS = [[(3 * i + 11 * j) % VOCAB for j in range(30 + 5 * i)] for i in range(5)]
WAYS = [
    pb.SlotSampling(top_p=1),
    pb.SlotSampling(top_p=1, temperature=1, seed=3),
    pb.SlotSampling(top_p=0.9, temperature=1, seed=4, frequency_penalty=0.3),
    pb.SlotSampling(top_p=1, logprobs=2),
    pb.SlotSampling(top_p=1),
]


async def test_the_text_comes_whatever_the_weights(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    texts = tmp_path / "texts.jsonl"
    lines = [
        {"prompt_token_ids": prompt, "token_ids": text}
        for prompt, text in zip(PROMPTS, TEXTS, strict=True)
    ]
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with local_worker(
        tmp_path, device="cuda", load_format="dummy", forced_texts=str(texts), dtype="bfloat16"
    ) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        for cut in ({"run_ahead": 3}, {"run_ahead": 2, "chunk": 16}):
            ran = [
                Sequence(prompt, len(text), sampling=way)
                for prompt, text, way in zip(PROMPTS, TEXTS, WAYS, strict=True)
            ]
            assert await driver.run(ran, **cut) == TEXTS
        assert not worker.fatal
