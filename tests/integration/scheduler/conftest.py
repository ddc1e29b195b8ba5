"""A scheduler in this process, started by each test as it needs it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.clients.gateway_stream import gateway_streams
from support.scripted.scheduler_stack import StartStack, stacks


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[StartStack]:
    """Starts schedulers with scripted workers; ends them after the test."""
    async with stacks(tmp_path) as start_stack:
        yield start_stack


@pytest.fixture
async def connect() -> AsyncIterator:
    """Opens streams as gateways do; closes them after the test."""
    async with gateway_streams() as connect_to:
        yield connect_to
