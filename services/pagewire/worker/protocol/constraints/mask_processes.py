"""The worker's end of its mask processes, which compile grammars and compute masks."""

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Lock, Thread

from pagewire.config import WorkerConfig
from pagewire.packing import Int32Array
from pagewire.worker.protocol.constraints import mask_server
from pagewire.worker.protocol.constraints.mask_memory import FENCE, MaskMemory
from pagewire.worker.protocol.constraints.mask_server import ServerOptions, Start
from pagewire.worker.protocol.queue_thread import QueueThread

# The most processes that are started if their number is not given.
MOST_PROCESSES = 8

log = logging.getLogger(__name__)


def default_processes() -> int:
    """Half of the cores, from 1 to `MOST_PROCESSES`. More would slow the threads that launch."""
    return min(max(len(os.sched_getaffinity(0)) // 2, 1), MOST_PROCESSES)


class Events:
    """One event for each mask process, raised when the process has written one kind of data."""

    def __init__(self, processes: int) -> None:
        self.fds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(processes)]
        self._polls = [select.poll() for _ in self.fds]
        for poll, fd in zip(self._polls, self.fds, strict=True):
            poll.register(fd, select.POLLIN)
        self._lock = Lock()  # one thread at a time waits
        self.lost = False  # no more will be raised

    def wait_for(self, awaited: Callable[[], tuple[int, float | None] | None]) -> None:
        """Returns when `awaited` returns None, or when the time is over.

        `awaited` returns a process to wait for, and the seconds that are left for it (None: no
        limit). It is called again when that process has raised its event.
        """
        if awaited() is None:  # without the lock: its holder may wait for this thread
            return
        with self._lock:
            while (waiting := awaited()) is not None:
                if self.lost:
                    raise RuntimeError("a mask process has ended, so what it owes will not come")
                process, left = waiting
                if left is not None and left <= 0:
                    return
                if self._polls[process].poll(None if left is None else 1e3 * left):
                    os.eventfd_read(self.fds[process])

    def set(self) -> None:
        """Wakes all waiting threads so that they check again."""
        for fd in self.fds:
            os.eventfd_write(fd, 1)


class MaskProcesses:
    """Starts the processes, sends them sequences and tokens, and notices their end."""

    def __init__(
        self, memory: MaskMemory, processes: int, on_error: Callable[[BaseException], None]
    ) -> None:
        """`on_error` is called when a process ends by itself; it should end the worker."""
        self.memory = memory
        self.count = processes
        self.masks_known, self.forced_known = Events(processes), Events(processes)
        self._generations = [0] * memory.slots
        self._on_error = on_error
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        # A pipe for each process. Tokens have one event for all processes: many writes would take
        # longer than a mask.
        self._starts = [Pipe(duplex=False) for _ in range(processes)]
        self._tokens = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = QueueThread("grammars", on_error)
        self._sending = Lock()  # of tokens

    def launch(self, config: WorkerConfig, model: Path, tokenizer: Path | None, vocab: int) -> None:
        """Starts the processes; `ready` waits for them."""
        starts = [read.fileno() for read, _ in self._starts]
        events = self.masks_known.fds, self.forced_known.fds
        options = ServerOptions(
            model=str(model),
            tokenizer=None if tokenizer is None else str(tokenizer),
            vocab_size=vocab,
            slots=self.memory.slots,
            words=self.memory.words,
            memory=self.memory.fd,
            tokens=self._tokens,
            processes=list(zip(starts, *events, strict=True)),
            log_level=config.log_level,
            log_format=config.log_format,
        )
        given = [fd for each in options.processes for fd in each]
        # One thread for each of these libraries: a forked process would not have the others.
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", mask_server.__name__, json.dumps(asdict(options))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=(options.memory, options.tokens, *given),
            env=os.environ | threads,
        )
        for read, _ in self._starts:
            read.close()

    def ready(self) -> bool:
        """Waits until the processes serve; False, with a line in the log, if they cannot."""
        assert self._process is not None
        assert self._process.stdout is not None
        served = self._process.stdout.readline() == b"ready\n"
        if served:
            Thread(target=self._watch, name="mask processes", daemon=True).start()
        else:
            status = self._process.wait()
            log.warning(
                "the mask processes ended with status %d: structured output is refused", status
            )
        return served

    def of_slot(self, slot: int) -> int:
        """The process that a slot belongs to."""
        return slot % self.count

    @property
    def pid(self) -> int:
        """The id of the process that starts the others."""
        assert self._process is not None
        return self._process.pid

    def start(self, starts: Iterable[Start]) -> None:
        """Assigns slots to sequences; does not wait."""
        of_process: dict[int, list[Start]] = {}
        for start in starts:
            of_process.setdefault(self.of_slot(start.slot), []).append(start)
        for process, some in of_process.items():
            # A grammar may be longer than a pipe's buffer.
            self._thread.post(partial(self._send_starts, process, some))

    def next_generation(self, slot: int) -> int:
        """The generation of a new sequence in `slot`."""
        self._generations[slot] += 1
        return self._generations[slot]

    def advance(self, rows: Int32Array) -> None:
        """Sends `rows [n, 3]`: slots, generations, and tokens; token -1 gives up a sequence."""
        memory, places = self.memory, len(self.memory.tokens)
        with self._sending:
            begin = int(memory.written[0])
            end = begin + len(rows)
            # A process that lags this far is paused: sequences do not continue without masks.
            while end - int(memory.read[: self.count].min()) > places:
                if self.masks_known.lost:
                    return
                time.sleep(0.001)
            memory.put_tokens(begin, rows)
            with FENCE:
                memory.written[0] = end
            os.eventfd_write(self._tokens, 1)

    def close(self) -> None:
        """Ends the processes."""
        self._closing = True
        self._thread.close()
        for _, send in self._starts:
            send.close()
        if self._process is not None:
            self._process.wait()

    def _send_starts(self, process: int, starts: list[Start]) -> None:
        try:
            self._starts[process][1].send(starts)
        except BrokenPipeError:  # `_watch` handles it
            log.error("a mask process does not read any more")

    def _watch(self) -> None:
        """Ends the worker if the processes end before `close`."""
        assert self._process is not None
        status = self._process.wait()
        if not self._closing:
            for events in (self.masks_known, self.forced_known):
                events.lost = True
                events.set()
            self._on_error(RuntimeError(f"a mask process has ended with status {status}"))
