"""A child process with its output."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from pagewire.parent_process import PARENT_VARIABLE

_MAX_LINE_BYTES = 1 << 20
_TAIL_LINES = 20


class ChildProcess:
    """A running command in its own session and process group.

    `on_line(line)` gets each line of its output and error output; `tail` keeps the last lines.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
        on_line: Callable[[str], None],
    ) -> None:
        self._process = process
        self._output = output
        self._pipe = pipe
        self._on_line = on_line
        self._reader = asyncio.create_task(self._read())
        self._group_ended = False
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> "ChildProcess":
        """Starts a command with `environment` added to this process's environment.

        A Ctrl-C at the terminal does not reach another session, so the supervisor decides the order
        in which processes end.
        """
        # The pipe is made here: with asyncio's own pipe, `wait` would return only after all
        # processes that hold it have ended, including grandchildren.
        read_end, write_end = os.pipe()
        try:
            output, pipe = await _open_reader(read_end)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=write_end,
                    start_new_session=True,
                    env={**os.environ, **environment, PARENT_VARIABLE: str(os.getpid())},
                )
            except BaseException:
                pipe.close()
                raise
        finally:
            os.close(write_end)
        return cls(process, output, pipe, on_line)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Waits for the end and the last lines; returns the exit status, negative for a signal.

        Kills the remaining processes of its group: they would hold memory, ports or devices.
        """
        status = await self._process.wait()
        self._signal(signal.SIGKILL)
        self._group_ended = True
        # A descendant in another group may hold the pipe open.
        await asyncio.wait([self._reader], timeout=1.0)
        self._reader.cancel()
        self._pipe.close()
        return status

    async def stop(self, grace: float) -> None:
        """Sends SIGTERM to the group, and SIGKILL after `grace` seconds."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace)
        self.kill()
        await self.wait()

    def kill(self) -> None:
        """Sends SIGKILL to the whole group."""
        self._signal(signal.SIGKILL)

    def hang_up(self) -> None:
        """Sends SIGHUP to the process, but not to its helper processes, which it would end."""
        if self.running:
            self._process.send_signal(signal.SIGHUP)

    def _signal(self, number: signal.Signals) -> None:
        # The system may reuse the number of an ended group.
        if not self._group_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _read(self) -> None:
        while True:
            try:
                raw = await self._output.readline()
            except ValueError:
                raw = b"(a line of more than 1 MiB was left out)\n"
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip("\n")
            self.tail.append(line)
            self._on_line(line)


async def _open_reader(read_end: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """A stream that reads from a pipe, and the transport to close it with."""
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", buffering=0)
    )
    return stream, transport


def describe_end(status: int) -> str:
    """An exit status in words, such as "was ended by SIGKILL"."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
