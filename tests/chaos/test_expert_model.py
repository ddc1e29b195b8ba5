"""A tiny model with experts and torch operations in float32: faults do not change its answers."""

import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pagewire.models import EMBEDDED, EMBEDDED_NAME, resolve_model
from pagewire.worker.model.config import read_model_config
from support.clients.load import Answer
from support.models.tiny_models import save_model
from support.processes.fleet import Fleet, running_fleet
from support.processes.fleet_checks import undisturbed
from support.processes.real_model import CLIENTS, WORKER, questions, run_with_fault

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 7 experts and a shared one, and the tokenizer of the embedded model."""
    folder, embedded = tmp_path_factory.mktemp("model"), resolve_model(EMBEDDED)
    # Small weights: last bits depend on the batch, and large logits would differ more.
    sizes = {"num_experts": 7, "initializer_range": 0.1}
    save_model(folder, "qwen2-moe", vocab_size=read_model_config(embedded).vocab_size, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_workers(model: Path) -> AsyncIterator[Fleet]:
    named = (f"--model={model}", f"--served-model-name={EMBEDDED_NAME}")
    async with running_fleet(
        workers=2, worker_command=(*WORKER, *named), scheduler_flags=named
    ) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed_answers(two_workers: Fleet) -> list[Answer]:
    """The answers to 24 questions."""
    return await undisturbed(two_workers, questions(24), CLIENTS)


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0"])
async def test_answers_equal_those_of_an_undisturbed_run(
    two_workers: Fleet, undisturbed_answers: list[Answer], victim: str
) -> None:
    asked = questions(len(undisturbed_answers))
    assert len({str(answer.texts) for answer in undisturbed_answers}) > len(asked) // 2
    await run_with_fault(two_workers, asked, undisturbed_answers, victim, signal.SIGKILL)
