"""Real processes whose model says what the prompt tells it to say, and the clients of two APIs."""

import os
from collections.abc import AsyncIterator

import anthropic
import openai
import pytest
import pytest_asyncio

from support.processes.fleet import TESTS, Fleet, running_fleet
from support.scripted.text_worker import PROGRAM, text_model_folder


@pytest_asyncio.fixture(loop_scope="package", scope="package")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """A gateway, a scheduler and a worker. A test that kills one waits until it is there again."""
    model = text_model_folder(tmp_path_factory.mktemp("model"))
    flags = (f"--model={model}", "--served-model-name=text")
    worker = (
        "simulated-worker",
        *flags,
        "--profile=h200-qwen3-0.6b",
        "--speedup=0.15",
        "--num-blocks=2000",
        "--num-slots=32",
        "--max-model-len=8192",
    )
    os.environ["PYTHONPATH"] = str(TESTS)
    async with running_fleet(
        1, worker_command=worker, scheduler_flags=flags, program=PROGRAM, proxied=False
    ) as started:
        yield started


@pytest.fixture
def client(fleet: Fleet) -> openai.AsyncOpenAI:
    """OpenAI's client."""
    return openai.AsyncOpenAI(base_url=f"{fleet.urls[0]}/v1", api_key="x", max_retries=0)


@pytest.fixture
def messages_client(fleet: Fleet) -> anthropic.AsyncAnthropic:
    """Anthropic's client."""
    return anthropic.AsyncAnthropic(base_url=fleet.urls[0], api_key="x", max_retries=0)
