"""Envoy accepts its configuration, and forwards the disconnection of clients."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest

from pagewire.cli.launch.ports import free_port
from pagewire.rpc.transport import open_channel
from pagewire.v1.inference_pb2_grpc import InferenceStub
from support.processes.gateway_process import GatewayProcess, gateway, ready_gateway
from support.scripted.scheduler_stack import (
    MODEL,
    Stack,
    StartStack,
    collect,
    request,
    stacks,
    worker_info,
)
from support.waiting import eventually, until

CONFIG = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"
RUN = CONFIG.with_name("run.sh")


_ENDPOINT = """
              - endpoint:
                  address:
                    socket_address: {{address: {}, port_value: {}}}"""
_GRPC_HEALTH = "grpc_health_check: {service_name: pagewire.v1.Inference}"


def find_envoy() -> str | None:
    """The path of Envoy, from PATH or from the environment that runs the tests."""
    return shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))


needs_envoy = pytest.mark.skipif(
    find_envoy() is None, reason="no envoy on the path; the image has one"
)


@needs_envoy
def test_envoy_accepts_its_configuration_without_a_warning() -> None:
    command = [str(find_envoy()), "--mode", "validate", "--log-level", "warning", "-c", str(CONFIG)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "[warning]" not in output, output


class Proxied:
    """A scheduler with one scripted worker, a gateway, and Envoy in front of both."""

    def __init__(
        self,
        stack: Stack,
        http_port: int,
        grpc_port: int,
        admin_port: int,
        envoy: asyncio.subprocess.Process,
        gateways: list[GatewayProcess],
    ) -> None:
        self.stack = stack
        self.gateways = gateways
        self.envoy = envoy
        self.http_port = http_port
        self._admin_port = admin_port
        self.grpc_address = f"127.0.0.1:{grpc_port}"

    async def begin(self) -> asyncio.StreamWriter:
        """Sends a streamed request; returns the connection."""
        return (await self.stream(150))[1]

    async def stream(self, max_tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends a streamed request; returns the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True}
        data = json.dumps({**body, "ignore_eos": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        return reader, writer

    def gateway_is_ready(self) -> bool:
        """Whether the gateway's last health check succeeded."""
        return [*self.flags("gateways").values()] == ["healthy"]

    def flags(self, cluster: str) -> dict[int, str]:
        """Envoy's health flags of each server of a cluster, by port."""
        clusters = httpx.get(f"http://127.0.0.1:{self._admin_port}/clusters").text
        pattern = rf"^{cluster}::127\.0\.0\.1:(\d+)::health_flags::(.*)$"
        return {int(port): flags for port, flags in re.findall(pattern, clusters, re.MULTILINE)}

    def ejections(self, cluster: str) -> int:
        """How often a server reached the failures for an ejection, if another is left."""
        stats = httpx.get(f"http://127.0.0.1:{self._admin_port}/stats").text
        pattern = rf"^cluster\.{cluster}\.outlier_detection\.ejections_detected_\w+: (\d+)$"
        return sum(map(int, re.findall(pattern, stats, re.MULTILINE)))

    async def until_load(self, running: int, waiting: int) -> None:
        """Waits until `running` requests run and `waiting` wait."""

        def reached() -> bool:
            load = self.stack.engine.load()
            return (load.running, load.waiting) == (running, waiting)

        await eventually(reached, 20)

    async def check_blocks_are_freed(self) -> None:
        """The last request's blocks are free two steps after the scheduler closed it."""
        await eventually(lambda: self.stack.engine.num_open == 0, 20)
        steps = self.stack.workers[0].steps
        await eventually(lambda: self.stack.engine.load().used_blocks == 0, 20)
        assert self.stack.workers[0].steps - steps <= 2


@pytest.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[Proxied]:
    async with _behind_envoy(tmp_path, num_gateways=1) as proxied:
        yield proxied


@contextlib.asynccontextmanager
async def _behind_envoy(folder: Path, num_gateways: int) -> AsyncIterator[Proxied]:
    http_port, grpc_port, admin_port = (free_port() for _ in range(3))
    async with stacks(folder) as start:
        stack = await _slow_stack(start)
        with contextlib.ExitStack() as ends:
            served = [
                ends.enter_context(gateway(f"127.0.0.1:{stack.port}")) for _ in range(num_gateways)
            ]
            for each in served:
                await asyncio.to_thread(each.wait_ready)
            gateways = [_endpoint(each.address[1]) for each in served]
            config = CONFIG.read_text()
            for old, new in (
                (_ENDPOINT.format("gateway", 8000), "".join(gateways)),
                (_ENDPOINT.format("scheduler", 50051), _endpoint(stack.port)),
                ("{address: 0.0.0.0, port_value: 8080}", _local(http_port)),
                ("{address: 0.0.0.0, port_value: 50051}", _local(grpc_port)),
                ("{address: 127.0.0.1, port_value: 9901}", _local(admin_port)),
                # This scheduler has no health service.
                (_GRPC_HEALTH, "tcp_health_check: {}"),
            ):
                assert config.count(old) == 1, old
                config = config.replace(old, new)
            path = folder / "envoy.yaml"
            path.write_text(config)
            command = ["bash", str(RUN), "--log-level", "warning", "--use-dynamic-base-id"]
            command += ["--concurrency", "1", "-c", str(path)]
            environment = {
                **os.environ,
                "PATH": f"{Path(str(find_envoy())).parent}{os.pathsep}{os.environ['PATH']}",
                "ADMIN_PORT": str(admin_port),
                "DRAIN_SECONDS": "1",
            }
            # The program on PATH may be a script that starts Envoy: end its process group.
            envoy = await asyncio.create_subprocess_exec(
                *command, start_new_session=True, env=environment
            )
            try:
                await asyncio.to_thread(until, lambda: _answers(http_port), 30)
                yield Proxied(stack, http_port, grpc_port, admin_port, envoy, served)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(envoy.pid, signal.SIGKILL)
                await envoy.wait()


async def _slow_stack(start: StartStack) -> Stack:
    stack = await start(worker_info(num_slots=1))
    stack.workers[0].step_seconds = 0.1  # no request ends before its client disconnects
    return stack


def _local(port: object) -> str:
    return f"{{address: 127.0.0.1, port_value: {port}}}"


def _endpoint(port: object) -> str:
    return _ENDPOINT.format("127.0.0.1", port)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False


@needs_envoy
async def test_disconnected_http_clients_behind_envoy_free_their_blocks(proxied: Proxied) -> None:
    running = await proxied.begin()
    await proxied.until_load(1, 0)
    waiting = await proxied.begin()
    await proxied.until_load(1, 1)
    waiting.close()
    await proxied.until_load(1, 0)
    running.close()
    await proxied.check_blocks_are_freed()
    await proxied.stack.settle()


@needs_envoy
async def test_disconnected_grpc_clients_behind_envoy_free_their_blocks(proxied: Proxied) -> None:
    async with open_channel(proxied.grpc_address) as channel:
        stub = InferenceStub(channel)
        calls, readers = [], []
        for number in range(2):
            calls.append(stub.Generate(request([number], 150)))
            readers.append(asyncio.create_task(collect(calls[-1])))
            await proxied.until_load(1, number)
        calls[1].cancel()
        await proxied.until_load(1, 0)
        calls[0].cancel()
        await proxied.check_blocks_are_freed()
        for reader in readers:
            with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
                await reader
    await proxied.stack.settle()


@needs_envoy
async def test_requests_wait_at_a_gateway_that_is_not_ready(proxied: Proxied) -> None:
    """New requests wait while no scheduler has a worker, also behind a proxy."""
    [worker], [address] = proxied.stack.workers, proxied.stack.addresses
    await worker.stop()
    await eventually(lambda: not proxied.gateway_is_ready(), 20)
    reader, _ = await proxied.stream(20)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(1), 1)
    await worker.start(address)
    assert (await until_done(reader)).startswith(b"HTTP/1.1 200 ")
    await eventually(proxied.gateway_is_ready, 20)


@needs_envoy
async def test_deadlines_of_requests_eject_no_gateway_and_no_scheduler(tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": [1], "max_tokens": 100, "ignore_eos": True}
    async with _behind_envoy(tmp_path, num_gateways=2) as proxied:
        proxied.stack.workers[0].step_seconds = 0.01
        url = f"http://127.0.0.1:{proxied.http_port}/v1/completions"
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(60):
                answer = await client.post(url, json={**body, "deadline_ms": 1})
                assert answer.status_code == 504
        async with open_channel(proxied.grpc_address) as channel:
            for _ in range(30):
                late = request([1], 100)
                late.deadline_ms = 1
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await collect(InferenceStub(channel).Generate(late))
                assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert [*proxied.flags("gateways").values()] == ["healthy"] * 2
        assert proxied.ejections("gateways") == 0
        assert proxied.ejections("schedulers") == 0, "the only one is never ejected, but counted"
        await proxied.stack.settle()


@needs_envoy
async def test_calls_wait_while_the_only_known_scheduler_drains(proxied: Proxied) -> None:
    """Another one may have started that Envoy has not found yet."""
    proxied.stack.engine.intake.draining = True
    async with open_channel(proxied.grpc_address) as channel:
        given = (("x-request-id", "mine"),)
        call = InferenceStub(channel).Generate(request([1], 3), metadata=given)
        answer = asyncio.create_task(collect(call))
        await asyncio.sleep(2)
        assert not answer.done()
        proxied.stack.engine.intake.draining = False
        assert len((await asyncio.wait_for(answer, 20))[0]) == 3
    await proxied.stack.settle()


@needs_envoy
async def test_requests_wait_while_the_only_known_gateway_is_gone(tmp_path: Path) -> None:
    async with _behind_envoy(tmp_path, num_gateways=1) as proxied:
        proxied.stack.workers[0].step_seconds = 0.001
        [dead] = proxied.gateways
        dead.process.kill()
        dead.process.wait()
        reader, _ = await proxied.stream(3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 2)
        async with ready_gateway(f"127.0.0.1:{proxied.stack.port}", port=dead.address[1]):
            assert (await until_done(reader)).startswith(b"HTTP/1.1 200 ")
        await proxied.stack.settle()


async def until_done(reader: asyncio.StreamReader) -> bytes:
    """A streamed answer, up to its end."""
    answer = b""
    while b"[DONE]" not in answer:
        piece = await asyncio.wait_for(reader.read(65536), 60)
        assert piece, answer[-200:]
        answer += piece
    return answer


@needs_envoy
async def test_envoy_drains_on_sigterm(proxied: Proxied) -> None:
    """Open streams complete, new connections are refused meanwhile, then Envoy ends."""
    reader, _ = await proxied.stream(60)
    await proxied.until_load(1, 0)
    async with open_channel(proxied.grpc_address) as channel:
        call = collect(InferenceStub(channel).Generate(request([7], 60)))
        over_grpc = asyncio.create_task(call)
        await proxied.until_load(1, 1)
        proxied.envoy.terminate()
        # Connections made while load balancers look elsewhere are served.
        assert await asyncio.to_thread(_answers, proxied.http_port)
        await eventually(lambda: not _listens(proxied.http_port), 20)
        assert proxied.envoy.returncode is None
        assert proxied.stack.engine.num_open == 2
        await until_done(reader)
        tokens, _, finish = await over_grpc
        assert len(tokens) == finish.usage.completion_tokens == 60
    assert await asyncio.wait_for(proxied.envoy.wait(), 20) == 0
    await proxied.stack.settle()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
