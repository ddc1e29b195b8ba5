"""When a stream to a scheduler counts as lost, and how it ends."""

import asyncio

import pytest

from pagewire.addresses import parse_addresses
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.connection import Connection
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.rpc.protocol import SILENT_HEARTBEATS
from support.clients.failing_calls import fails_when_cancelled
from support.scripted.routing import (
    Connect,
    all_ended,
    assert_complete,
    scripted_generation,
)
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually


async def test_a_silent_scheduler_is_lost(
    connect: Connect, peers: list[ScriptedScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gateway.routing.connection.HEARTBEAT_SECONDS", 0.1)
    peers[1].waiting = 50
    peers[0].step = 0.02
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = scripted_generation(tokens=40)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    peers[0].mute = True
    await all_ended([run], 5)
    assert [len(peer.submitted) for peer in peers] == [1, 1]
    assert_complete([run])
    peers[0].mute = False
    await eventually(lambda: all(link.ready for link in schedulers.links.values()))


async def test_a_scheduler_that_stops_reading_is_lost(
    connect: Connect, peers: list[ScriptedScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example because a damaged length makes it wait for the rest of a message."""
    monkeypatch.setattr("pagewire.gateway.routing.connection.HEARTBEAT_SECONDS", 0.1)
    peers[1].waiting = 50
    peers[0].step = peers[1].step = 0.02
    peers[0].read = 0
    schedulers = await connect(*[await peer.start() for peer in peers])
    checks = 0
    check_read = Connection.check_read

    def counting_check(connection: Connection, num_read: int) -> None:
        nonlocal checks
        checks += 1
        check_read(connection, num_read)

    monkeypatch.setattr(Connection, "check_read", counting_check)
    await eventually(lambda: checks > 2 * SILENT_HEARTBEATS)
    assert all(link.ready for link in schedulers.links.values()), "it had nothing to read"
    run = scripted_generation(tokens=200)
    schedulers.submit([run])
    await all_ended([run], 10)
    assert [len(peer.submitted) for peer in peers] == [1, 1]
    assert_complete([run])


async def test_close_ends_a_call_that_fails_when_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = False

    async def run_stream(connection: Connection) -> None:
        nonlocal started
        started = True
        await fails_when_cancelled(connection)

    monkeypatch.setattr(Connection, "_run_stream", run_stream)
    schedulers = Schedulers(parse_addresses("127.0.0.1:1"), GatewayMetrics(), resume_seconds=1.0)
    await schedulers.start()
    await eventually(lambda: started)
    await asyncio.wait_for(schedulers.close(), 5)
