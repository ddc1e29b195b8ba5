"""The link to one worker."""

import asyncio
from unittest.mock import Mock

import pytest

from pagewire.scheduler.workers.link import WorkerEvents, WorkerLink
from support.clients.failing_calls import fails_when_cancelled


async def test_a_cancelled_link_ends_although_its_call_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC may answer a cancellation with an error of the call."""
    serving = asyncio.Event()

    async def serve(link: WorkerLink) -> None:
        serving.set()
        await fails_when_cancelled(link)

    monkeypatch.setattr(WorkerLink, "_serve", serve)
    link = asyncio.create_task(WorkerLink("127.0.0.1:1", Mock(spec=WorkerEvents)).run())
    await serving.wait()
    link.cancel()
    done, _ = await asyncio.wait([link], timeout=5)
    assert done
