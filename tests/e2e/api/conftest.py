"""Real processes whose model writes the text that the prompt asks for, and clients of two APIs."""

from collections.abc import AsyncIterator

import anthropic
import openai
import pytest
import pytest_asyncio

from support.processes.fleet import Fleet
from support.scripted.text_worker import text_fleet


@pytest_asyncio.fixture(loop_scope="package", scope="package")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """A gateway, a scheduler and a worker. A test that kills one waits until it runs again."""
    async with text_fleet(tmp_path_factory.mktemp("model")) as started:
        yield started


@pytest.fixture
def client(fleet: Fleet) -> openai.AsyncOpenAI:
    """OpenAI's client."""
    return openai.AsyncOpenAI(base_url=f"{fleet.urls[0]}/v1", api_key="x", max_retries=0)


@pytest.fixture
def messages_client(fleet: Fleet) -> anthropic.AsyncAnthropic:
    """Anthropic's client."""
    return anthropic.AsyncAnthropic(base_url=fleet.urls[0], api_key="x", max_retries=0)
