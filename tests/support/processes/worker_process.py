"""A worker in its own process, and its step streams over gRPC."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.rpc.checksums import RUN, open_stream, receive
from pagewire.rpc.protocol import PROTOCOL_VERSION
from pagewire.rpc.transport import open_channel
from pagewire.v1 import worker_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING

_MAIN = """
import json, sys
from pagewire.config import WorkerConfig
from pagewire.worker.server import run_worker
run_worker(WorkerConfig(**json.loads(sys.argv[1])))
"""


@dataclass
class GrpcStream:
    """A step stream over gRPC; `ready` is the worker's first message."""

    call: Any
    ready: pb.WorkerInfo

    @classmethod
    async def open(
        cls, channel: grpc.aio.Channel, epoch: int, version: int = PROTOCOL_VERSION
    ) -> "GrpcStream":
        call = open_stream(channel, RUN)
        hello = pb.Hello(protocol_version=version, epoch=epoch)
        await call.write(pb.RunRequest(hello=hello))
        response = await receive(call)  # raises the status if the stream is refused
        return cls(call, response.ready)

    async def send(self, step: pb.Step) -> None:
        await self.call.write(pb.RunRequest(step=step))

    async def receive(self) -> pb.StepResult:
        while not (response := await receive(self.call)).HasField("result"):
            pass
        return response.result

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """The status with which the stream ends; results before it are dropped."""
        try:
            while await asyncio.wait_for(self.call.read(), 20) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return await self.call.code(), await self.call.details()


class WorkerProcess:
    """A worker process that listens on a socket file."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self.socket = folder / "worker.sock"
        self.process = process
        self._log = log

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_status(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)

    async def until_listening(self) -> None:
        """Waits for the socket: a channel that fails to connect waits longer after each attempt."""
        deadline = time.monotonic() + 60
        while not self.socket.exists():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            await asyncio.sleep(0.01)

    async def health(self, channel: grpc.aio.Channel, service: str = "") -> int:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return (await stub.Check(request, wait_for_ready=True, timeout=20)).status

    async def until_serving(self, channel: grpc.aio.Channel) -> None:
        deadline = time.monotonic() + 60
        while await self.health(channel) != SERVING:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            await asyncio.sleep(0.02)


@contextmanager
def worker_process(
    folder: Path, model: Path | str, prologue: str = "", **settings: Any
) -> Iterator[WorkerProcess]:
    """Starts a worker with small defaults; kills it at the end of the block if it still runs.

    `prologue` is Python code that the process runs first.
    """
    settings = {
        "model": str(model),
        "worker_address": f"unix:{folder}/worker.sock",
        "device": "cpu",
        "num_blocks": 128,
        "num_slots": 16,
        "torch_threads": 1,
        "drain_timeout": 10.0,
        **settings,
    }
    log = folder / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", prologue + _MAIN, json.dumps(settings)], stderr=output
        )
    try:
        yield WorkerProcess(folder, process, log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@asynccontextmanager
async def channel_to(worker: WorkerProcess) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a worker; waits until the worker is ready."""
    await worker.until_listening()
    async with open_channel(worker.address) as channel:
        await worker.until_serving(channel)
        yield channel


@asynccontextmanager
async def serving_worker(
    folder: Path, model: Path | str, **settings: Any
) -> AsyncIterator[tuple[WorkerProcess, grpc.aio.Channel]]:
    """A new worker that is ready, and a channel to it."""
    with worker_process(folder, model, **settings) as worker:
        async with channel_to(worker) as channel:
            yield worker, channel
