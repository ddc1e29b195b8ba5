"""A gateway and scripted schedulers, each in its own process."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx

from support.waiting import until

_RUN = (
    "import json, sys; from pagewire.config import GatewayConfig; "
    "from pagewire.gateway.server import run_gateway; "
    "run_gateway(GatewayConfig(**json.loads(sys.argv[1])))"
)
# A receive window smaller than a loopback segment would make TCP wait for its timers.
_RECEIVED = 1 << 16
_SCHEDULER = Path(__file__).parents[1] / "scripted" / "scripted_scheduler.py"


def command(config: dict[str, Any], missing: str | None = None) -> list[str]:
    """The command line of a gateway with these settings, without the package `missing`."""
    hide = f"import sys; sys.modules[{missing!r}] = None; " if missing else ""
    return [sys.executable, "-c", hide + _RUN, json.dumps(config)]


class GatewayProcess:
    """A running gateway, its URL and its log."""

    def __init__(self, schedulers: str, **settings: Any) -> None:
        config = {"schedulers": schedulers, "port": 0, "gateway_metrics_port": 0, **settings}
        self.process = subprocess.Popen(command(config), stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.url = self._wait_for_url()
        self.metrics_url = self._logged(r"metrics on (http://\S+)")

    def wait_ready(self, seconds: float = 10.0) -> None:
        """Waits until /readyz answers 200."""
        until(lambda: httpx.get(f"{self.url}/readyz").status_code == 200, seconds)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of an HTTP gateway."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        text = httpx.get(self.metrics_url).text
        found = re.search(rf"^pagewire_gateway_{name} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not among the metrics"
        return float(found[1])

    def stop(self) -> int:
        """Sends SIGTERM; returns the exit status."""
        self.process.terminate()
        try:
            return self.process.wait(15)
        finally:
            self.process.kill()
            self._reader.join(5)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    def _wait_for_url(self) -> str:
        pattern = re.compile(r"ready on (https?://\S+)")
        until(lambda: any(map(pattern.search, self.log)) or self.process.poll() is not None, 20)
        found = self._logged(pattern.pattern)
        assert found, f"the gateway did not start: {self.log}"
        return found

    def _logged(self, pattern: str) -> str:
        """The first group of the first line of the log that matches; empty if none does."""
        matches = (re.search(pattern, line) for line in self.log)
        return next((match[1] for match in matches if match), "")


@contextlib.contextmanager
def gateway(schedulers: str, **settings: Any) -> Iterator[GatewayProcess]:
    """A gateway that runs until the end of the block."""
    process = GatewayProcess(schedulers, **settings)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.stop()


@contextlib.asynccontextmanager
async def ready_gateway(schedulers: str, **settings: Any) -> AsyncIterator[GatewayProcess]:
    """A gateway that is ready, while the event loop runs its schedulers."""
    with contextlib.ExitStack() as stack:
        process = await asyncio.to_thread(stack.enter_context, gateway(schedulers, **settings))
        await asyncio.to_thread(process.wait_ready)
        yield process
        await asyncio.to_thread(stack.close)


@contextlib.contextmanager
def scheduler(
    step: float, address: str | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A scripted scheduler's address and process; it runs until the end of the block."""
    listening = [] if address is None else ["--address", address]
    process = subprocess.Popen(
        [sys.executable, str(_SCHEDULER), *listening, "--step", str(step)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}", process
    finally:
        process.kill()
        process.wait()


async def raw_request(
    url: str, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a completion request; the test reads and closes the connection.

    About `_RECEIVED` bytes are received before the test reads.
    """
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=_RECEIVED)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer
