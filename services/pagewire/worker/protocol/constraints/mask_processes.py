"""The worker's end of its mask processes, which compile grammars and compute masks."""

import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Lock, Thread

import numpy as np
from numpy.typing import NDArray

from pagewire.config import WorkerConfig
from pagewire.worker.protocol.constraints import mask_server
from pagewire.worker.protocol.constraints.mask_memory import MaskMemory
from pagewire.worker.protocol.constraints.mask_server import ServerOptions, Start
from pagewire.worker.protocol.queue_thread import QueueThread

# The most processes that are started if their number is not given.
MOST_PROCESSES = 8

log = logging.getLogger(__name__)


def default_processes() -> int:
    """Half as many as there are cores, from 1 to `MOST_PROCESSES`."""
    return min(max(len(os.sched_getaffinity(0)) // 2, 1), MOST_PROCESSES)


class Event:
    """Raised by mask processes when something of a kind is known; one thread at a time waits."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._lock = Lock()

    def wait_for(self, condition: Callable[[], float | None]) -> None:
        """Returns when `condition` returns 0 or less.

        It is called at first, and whenever the event was raised or as many seconds have passed as
        it returned; None: any number.
        """
        with self._lock:
            while (left := condition()) is None or left > 0:
                # At least a millisecond; the next look comes then, if not before.
                if self._poll.poll(None if left is None else 1e3 * left + 1):
                    os.eventfd_read(self.fd)

    def set(self) -> None:
        """Lets who waits look again."""
        os.eventfd_write(self.fd, 1)


class MaskProcesses:
    """Starts the processes, sends them sequences and tokens, and notices their end."""

    def __init__(
        self, memory: MaskMemory, processes: int, on_error: Callable[[BaseException], None]
    ) -> None:
        """`on_error` is called when a process ends by itself; it should end the worker."""
        self.memory = memory
        self.count = processes
        self.masks_known, self.forced_known = Event(), Event()
        self.lost = False
        self._generations = [0] * memory.slots
        self._on_error = on_error
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes = [(Pipe(duplex=False), Pipe(duplex=False)) for _ in range(processes)]
        self._starts = [starts for (_, starts), _ in self._pipes]
        self._tokens = [tokens for _, (_, tokens) in self._pipes]
        self._thread = QueueThread("grammars", on_error)
        self._sending = Lock()  # of tokens

    def launch(self, config: WorkerConfig, model: Path, tokenizer: Path | None, vocab: int) -> None:
        """Starts the processes; `ready` waits for them."""
        pipes = [(starts[0].fileno(), tokens[0].fileno()) for starts, tokens in self._pipes]
        options = ServerOptions(
            model=str(model),
            tokenizer=None if tokenizer is None else str(tokenizer),
            vocab_size=vocab,
            slots=self.memory.slots,
            words=self.memory.words,
            memory=self.memory.fd,
            events=(self.masks_known.fd, self.forced_known.fd),
            pipes=pipes,
            log_level=config.log_level,
            log_format=config.log_format,
        )
        inherited = [options.memory, *options.events, *(fd for pair in pipes for fd in pair)]
        # One thread for each of the libraries that would start more: a fork has none of them.
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", mask_server.__name__, json.dumps(asdict(options))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=inherited,
            env=os.environ | threads,
        )
        for starts, tokens in self._pipes:
            starts[0].close()
            tokens[0].close()

    def ready(self) -> bool:
        """Waits until the processes serve; False if they cannot, as a line of the log says."""
        assert self._process is not None
        assert self._process.stdout is not None
        served = self._process.stdout.readline() == b"ready\n"
        if served:
            Thread(target=self._watch, name="mask processes", daemon=True).start()
        else:
            self._process.wait()
        return served

    @property
    def pid(self) -> int:
        """The process that has started the others."""
        assert self._process is not None
        return self._process.pid

    def start(self, start: Start) -> None:
        """Gives a slot to a sequence; does not wait."""
        # A grammar may be longer than what a pipe takes at once.
        self._thread.post(partial(self._send_start, start))

    def next_generation(self, slot: int) -> int:
        """The number of a sequence that takes `slot`."""
        self._generations[slot] += 1
        return self._generations[slot]

    def holds(self, slot: int, generation: int) -> bool:
        """Whether a sequence is the last that has taken `slot`."""
        return self._generations[slot] == generation

    def advance(self, rows: NDArray[np.int64]) -> None:
        """Hands on `rows [3, n]`: slots, generations, and tokens; -1 gives up a sequence."""
        owners = rows[0] % self.count
        with self._sending:
            for owner in np.flatnonzero(np.bincount(owners, minlength=self.count)).tolist():
                self._send(self._tokens[owner].send_bytes, rows[:, owners == owner].tobytes())

    def close(self) -> None:
        """Ends the processes."""
        self._closing = True
        self._thread.close()
        for connection in (*self._starts, *self._tokens):
            connection.close()
        if self._process is not None:
            self._process.wait()

    def _send_start(self, start: Start) -> None:
        self._send(self._starts[start.slot % self.count].send, start)

    def _send(self, send: Callable[..., None], message: object) -> None:
        try:
            send(message)
        except BrokenPipeError:  # `_watch` notices
            log.error("a mask process does not read any more")

    def _watch(self) -> None:
        """Ends the worker if the processes end before they are told to."""
        assert self._process is not None
        status = self._process.wait()
        if not self._closing:
            self.lost = True
            self.masks_known.set()
            self.forced_known.set()
            self._on_error(RuntimeError(f"a mask process has ended with status {status}"))
