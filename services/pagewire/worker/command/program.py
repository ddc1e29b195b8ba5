"""The external program as a process: its lines, its end and its restarts."""

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import IO

from pagewire.worker.command.messages import MAX_LINE_BYTES, NonsenseError, Ready, read_ready

log = logging.getLogger(__name__)

# Seconds. After its first end a program is started again at once, after later ends with delays that
# double. A run longer than STABLE_AFTER resets the delay.
FIRST_DELAY = 0.5
MAX_DELAY = 5.0
STABLE_AFTER = 10.0
_LAST_LINES = 10  # of its error output
_DRAIN_SECONDS = 1.0  # for lines that it wrote before its end
_TERM_SECONDS = 1.0


class Program:
    """Keeps one program running. Its messages are handled on threads of this object.

    `on_line` gets each line after the first one. If it raises NonsenseError, the program is killed.
    `on_end` gets the reason each time the program has ended. Lines sent before `on_end` are lost;
    later lines go to the next process.
    """

    def __init__(
        self,
        command: Sequence[str],
        start_seconds: float,
        on_line: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`start_seconds` is the time until the program's first line."""
        self._command = command
        self._start_seconds = start_seconds
        self._on_line = on_line
        self._on_end = on_end
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._fault: str | None = None
        self._ready: Ready | None = None
        self._first = threading.Event()
        self._closing = threading.Event()
        self._start_error = ""
        self._end = ""  # of the process before the present one
        self.started = False  # whether the present process has written its first line
        self.last_line_at = self.started_at = 0.0  # by time.monotonic()
        self._thread = threading.Thread(target=self._run, name="program", daemon=True)

    def start(self) -> Ready:
        """Starts the program and waits for its first line; RuntimeError if there is none.

        Later starts are automatic.
        """
        self._thread.start()
        atexit.register(self.close)
        self._first.wait()
        if self._ready is None:
            raise RuntimeError(self._start_error)
        return self._ready

    def send(self, line: bytes) -> None:
        """Queues a line; never waits for the program to read it."""
        self._outbox.put(line)

    def restart(self, reason: str) -> None:
        """Kills the program, which is then started again."""
        self._fault = self._fault or reason
        self._kill(signal.SIGKILL)

    def close(self) -> None:
        """Ends the program for good."""
        atexit.unregister(self.close)
        self._closing.set()
        self._kill(signal.SIGTERM)
        self._thread.join(_TERM_SECONDS)
        self._kill(signal.SIGKILL)

    @property
    def pid(self) -> int:
        """The process id of the present process, or of the last one."""
        return 0 if self._process is None else self._process.pid

    def _run(self) -> None:
        # The kernel ends a program when the thread that started it ends, so this thread lives as
        # long as the worker.
        ends = 0
        while not self._closing.is_set():
            began = time.monotonic()
            reason = self._run_once()
            if time.monotonic() - began > STABLE_AFTER:
                ends = 0
            if self._ready is None:
                self._start_error = reason
                self._first.set()
                return
            if self._closing.is_set():
                return
            delay = restart_delay(ends)
            ends += 1
            when = f" in {delay:g} s" if delay else ""
            log.error("%s; it is started again%s", reason, when)
            # Replaced before `on_end`: lines that `on_end` sends are for the next process.
            self._outbox = SimpleQueue()
            self._on_end(self._end)
            self._closing.wait(delay)

    def _run_once(self) -> str:
        """Runs the program to its end; returns the reason of the end."""
        self._fault = None
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pagewire.worker.command.shim",
                str(os.getpid()),
                *self._command,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        outbox, started = self._outbox, threading.Event()
        threads = [
            threading.Thread(
                target=self._read, args=(process.stdout, process.stdin, outbox, started)
            ),
            threading.Thread(target=_log_lines, args=(process.stderr, last_lines)),
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        late = threading.Timer(self._start_seconds, self._check_started, (started,))
        late.daemon = True
        late.start()
        process.wait()
        self.started = False
        late.cancel()
        self._kill(signal.SIGKILL)  # its children
        self._process = None  # the kernel may reuse its process id
        outbox.put(None)
        deadline = time.monotonic() + _DRAIN_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for pipe in (process.stdout, process.stderr):
            with contextlib.suppress(OSError, RuntimeError):
                pipe.close()
        return self._reason(process.returncode, last_lines)

    def _reason(self, status: int, last_lines: Sequence[str]) -> str:
        how = f"ended with exit status {status}"
        if status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        self._end = f"the program {self._fault or how}"
        lines = " | ".join(last_lines)
        return f"{self._end}; its last lines: {lines}" if lines else self._end

    def _read(
        self,
        output: IO[bytes],
        program_input: IO[bytes],
        outbox: "SimpleQueue[bytes | None]",
        started: threading.Event,
    ) -> None:
        """Handles the lines of a process until it ends; `started` is set by the first one."""
        try:
            first = _read_line(output)
            if not first:
                return
            ready = read_ready(first)
            if self._ready not in (None, ready):
                raise NonsenseError("its first line is another one than at its first start")
            self._ready = ready
            self.last_line_at = self.started_at = time.monotonic()
            self.started = True
            started.set()
            self._first.set()
            threading.Thread(target=_write, args=(program_input, outbox), daemon=True).start()
            while line := _read_line(output):
                self.last_line_at = time.monotonic()
                self._on_line(line)
        except NonsenseError as error:
            self.restart(f"wrote nonsense: {error}")
        except ValueError:
            return  # the pipe was closed after its end

    def _check_started(self, started: threading.Event) -> None:
        if not started.is_set():
            self.restart(f"wrote no first line within {self._start_seconds:g} s")

    def _kill(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)


def restart_delay(ends: int) -> float:
    """Seconds before a start, after the program has ended `ends` times in a row before."""
    return 0.0 if ends == 0 else min(FIRST_DELAY * 2.0 ** min(ends - 1, 10), MAX_DELAY)


def _read_line(pipe: IO[bytes]) -> bytes:
    """The next line; empty at the end. NonsenseError if it is too long."""
    line = pipe.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise NonsenseError(f"a line has more than {MAX_LINE_BYTES} bytes")
    return line


def _write(pipe: IO[bytes], outbox: "SimpleQueue[bytes | None]") -> None:
    with contextlib.suppress(OSError, ValueError):  # the program has ended
        while (line := outbox.get()) is not None:
            pipe.write(line)
            if outbox.empty():
                pipe.flush()
    with contextlib.suppress(OSError, ValueError):
        pipe.close()


def _log_lines(pipe: IO[bytes], last: "deque[str]") -> None:
    with contextlib.suppress(ValueError):
        while line := pipe.readline(MAX_LINE_BYTES):
            text = line.decode(errors="replace").rstrip()
            last.append(text)
            log.info("program: %s", text)
