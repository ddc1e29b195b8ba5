"""Servers and channels: the complete end of calls, and refused addresses."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.rpc.checksums import MULTIPLEX, open_stream
from pagewire.rpc.transport import Health, bind, end_call, make_server, open_channel
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually


def waiting_for_status() -> list[Any]:
    """gRPC's tasks for open calls, without those of this process's servers."""
    return [t for t in asyncio.all_tasks() if "_handle_status_once_received" in repr(t)]


async def test_a_call_whose_write_failed_leaves_no_task_behind() -> None:
    scheduler = ScriptedScheduler()
    address = await scheduler.start()
    try:
        async with open_channel(address) as channel:
            call = open_stream(channel, MULTIPLEX)
            await call.read()
            assert len(waiting_for_status()) == 1
            call._cython_call.set_internal_error("what gRPC does when a write fails")
            end_call(call)
        await eventually(lambda: not waiting_for_status())
    finally:
        await scheduler.stop()


async def test_a_watcher_of_health_receives_changes_after_another_has_left(tmp_path: Path) -> None:
    server, health, address = make_server(), Health("s"), f"unix:{tmp_path}/health.sock"
    health.attach(server)
    await health.set_serving(False)
    bind(server, [address])
    await server.start()
    try:
        async with open_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service="s")
            leaves, stays = stub.Watch(asked), stub.Watch(asked)
            for call in (leaves, stays):
                assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            leaves.cancel()
            # The server has noticed when a later call has its answer.
            await stub.Check(asked)
            for serving in (True, False):
                await health.set_serving(serving)
                async with asyncio.timeout(10):
                    received = (await stays.read()).status
                assert received == (await stub.Check(asked)).status
                assert (received == health_pb2.HealthCheckResponse.SERVING) is serving
    finally:
        await server.stop(None)


@pytest.mark.parametrize("address", ["127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1", ":50061", ""])
async def test_an_address_that_grpc_would_take_for_another_is_refused(address: str) -> None:
    with pytest.raises(RuntimeError, match=f"cannot listen on {address}: it is neither host:port"):
        bind(make_server(), [address])


async def test_a_socket_of_a_running_server_stays_with_it(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/server.sock"
    first = make_server()
    bind(first, [address])
    await first.start()
    inode = (tmp_path / "server.sock").stat().st_ino
    try:
        with pytest.raises(RuntimeError, match=f"{address}: another process listens there"):
            bind(make_server(), [address])
        assert (tmp_path / "server.sock").stat().st_ino == inode
    finally:
        await first.stop(None)


async def test_a_socket_that_a_killed_process_left_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.is_socket()
    server = make_server()
    bind(server, [f"unix:{path}"])
    await server.stop(None)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("absent/server.sock", "there is no folder .*/absent; make it"),
        ("plain", "plain exists and is not a socket; remove it"),
        ("s" * 120, "the path has more than 107 bytes; give a shorter one"),
    ],
)
async def test_a_socket_that_cannot_be_made_is_refused_with_the_reason(
    tmp_path: Path, path: str, problem: str
) -> None:
    (tmp_path / "plain").touch()
    with pytest.raises(RuntimeError, match=problem):
        bind(make_server(), [f"unix:{tmp_path}/{path}"])
