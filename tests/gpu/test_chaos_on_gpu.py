"""Processes with a model on a GPU are killed: with `--batch-invariant` no stream changes a bit.

The shapes are those of Qwen3-0.6B, with random weights and the vocabulary of the embedded model.
With weights and a KV cache in eight bits, answers may differ between batches; none may be cut or
lost. A GPU answers all requests within seconds, but a worker restarts more slowly. So clients
repeat the requests until every process has been killed, each in the middle of answers.
"""

import asyncio
import json
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from pagewire.models import EMBEDDED, EMBEDDED_NAME, resolve_model
from pagewire.worker.model.config import read_model_config
from support.clients.load import Answer, Load, Question, questions
from support.models.tiny_models import save_model
from support.processes.fleet import Fleet, running_fleet
from support.processes.fleet_checks import check_answers, report, undisturbed, until_idle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.chaos,
    pytest.mark.asyncio,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
WORKER = (
    "worker",
    "--device=cuda",
    "--dtype=bfloat16",
    "--load-format=dummy",
    "--num-blocks=4000",
    "--num-slots=64",
    "--max-model-len=2048",
    # Few sizes of steps, so that a killed worker is soon ready again.
    "--worker-max-num-batched-tokens=512",
)
REQUESTS = 96
CLIENTS = 32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    embedded = resolve_model(EMBEDDED)
    vocabulary = read_model_config(embedded).vocab_size
    save_model(tmp_path, "qwen3", vocab_size=vocabulary, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    # Layers beyond the first are random, too, but never stored.
    layers = ["full_attention"] * SIZES["num_hidden_layers"]
    config |= SIZES | {"initializer_range": 0.04, "layer_types": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, tmp_path)
    return tmp_path


@asynccontextmanager
async def fleet_with(model: Path, *flags: str) -> AsyncIterator[Fleet]:
    """Two workers on one GPU, two schedulers that share them, and a gateway."""
    named = (f"--model={model}", f"--served-model-name={EMBEDDED_NAME}")
    async with running_fleet(
        workers=2,
        schedulers=2,
        worker_command=(*WORKER, *named, *flags),
        scheduler_flags=named,
        gateway_flags=("--resume-timeout=120",),
        shared=True,
    ) as fleet:
        yield fleet


async def run_with_kills(fleet: Fleet, asked: list[Question], *victims: str) -> list[Answer]:
    """The answers of all rounds of requests, while one process after the other is killed."""
    load = Load(fleet.urls, asked, CLIENTS, endless=True)
    running = asyncio.create_task(load.run())
    for victim in victims:
        await load.reached(load.done + CLIENTS)
        before = len(fleet.log)
        fleet.signal(victim, signal.SIGKILL)
        await fleet.until_restarted(victim, since=before)
    await load.reached(load.done + CLIENTS)
    load.stop()
    return await running


async def test_no_stream_changes_a_bit(model: Path) -> None:
    asked = questions(REQUESTS)
    async with fleet_with(model, "--batch-invariant") as fleet:
        want = await undisturbed(fleet, asked, CLIENTS)
        got = await run_with_kills(fleet, asked, "worker-0", "scheduler-0", "worker-1")
        report("two workers on a GPU and a scheduler killed", asked, got, want)
        check_answers(fleet, asked, got, want)
        await until_idle(fleet, workers=2)
    assert len({str(answer.texts) for answer in want}) > REQUESTS // 2


async def test_quantized_streams_are_complete(model: Path) -> None:
    asked = questions(REQUESTS)
    for question in asked:
        question.body.pop("stop", None)  # every answer has all its tokens
    async with fleet_with(model, "--quantization=fp8", "--kv-cache-dtype=fp8") as fleet:
        got = await run_with_kills(fleet, asked, "worker-0", "scheduler-0")
        assert [answer.error for answer in got if answer.error is not None] == []
        for number, answer in enumerate(got):
            body = asked[number % REQUESTS].body
            assert answer.tokens == body["max_tokens"] * body.get("n", 1)
        await until_idle(fleet, workers=2)
