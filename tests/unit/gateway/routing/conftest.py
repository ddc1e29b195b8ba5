"""Scripted schedulers, and the part of a gateway that connects to them."""

from collections.abc import AsyncIterator

import pytest

from pagewire.addresses import parse_addresses
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.schedulers import Schedulers
from support.scripted.routing import Connect
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connects to the schedulers at some addresses, and waits until they are ready."""
    opened: list[Schedulers] = []

    async def open_schedulers(*addresses: str, resume_seconds: float = 5.0) -> Schedulers:
        schedulers = Schedulers(
            parse_addresses(",".join(addresses)), GatewayMetrics(), resume_seconds=resume_seconds
        )
        opened.append(schedulers)
        await schedulers.start()
        await eventually(lambda: all(link.ready for link in schedulers.links.values()))
        return schedulers

    yield open_schedulers
    for schedulers in opened:
        await schedulers.close()


@pytest.fixture
async def peers() -> AsyncIterator[list[ScriptedScheduler]]:
    """Two schedulers, not started yet. A test may append more."""
    peers = [ScriptedScheduler(), ScriptedScheduler()]
    yield peers
    for peer in peers:
        if peer._server is not None:
            await peer.stop()
