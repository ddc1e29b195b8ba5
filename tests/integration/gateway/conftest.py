"""A scheduler in this process, and a gateway process in front of it."""

from collections.abc import AsyncIterator

import httpx
import pytest

from support.processes.gateway_process import GatewayProcess, ready_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler


@pytest.fixture
async def peer() -> AsyncIterator[ScriptedScheduler]:
    """The scheduler; `served`, or the test, starts it."""
    peer = ScriptedScheduler()
    yield peer
    await peer.stop()


@pytest.fixture
async def served(peer: ScriptedScheduler) -> AsyncIterator[GatewayProcess]:
    """The gateway."""
    async with ready_gateway(await peer.start()) as process:
        yield process


@pytest.fixture
async def http(served: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway."""
    async with httpx.AsyncClient(base_url=served.url, timeout=20) as client:
        yield client
