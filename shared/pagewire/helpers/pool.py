"""The helper processes of one service, and the queue of their tasks."""

import asyncio
import bisect
import contextlib
import logging
import pickle
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagewire.errors import RequestError
from pagewire.helpers.process import ANSWER, HEAD, READY, REFUSAL, SIZE

log = logging.getLogger(__name__)

# After this time the helper of a cancelled task that has not finished is killed and replaced.
GRACE_SECONDS = 0.5
RESTART_SECONDS = 1.0
START_SECONDS = 60.0
_PIECE_BYTES = 1 << 18

# A part of a task, or an answer. A copy of a large one would block the event loop.
Bytes = bytes | bytearray

# Called for each task with its outcome ("answered", "refused", "failed" or "cancelled") and the
# seconds from `run` to its end.
Observe = Callable[[str, float], None]


class HelperError(Exception):
    """A task has no answer: its helper failed, ended or took too long, as the message says."""


class TaskError(HelperError):
    """A task took too long, or its helper ended during the task: the task may be the cause."""


@dataclass(slots=True, eq=False)
class _Task:
    parts: tuple[Bytes, ...]
    large: bool
    answer: asyncio.Future[Bytes]
    began: float = field(default_factory=time.monotonic)

    @property
    def magnitude(self) -> int:
        """The power of two of its size. Tasks of one magnitude take about the same time."""
        return sum(map(len, self.parts)).bit_length()


@dataclass(slots=True, eq=False)
class _Helper:
    """One process. `task` is its present task; `wake` is set when it receives one."""

    process: asyncio.subprocess.Process
    connection: socket.socket
    task: _Task | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class HelperPool:
    """Processes that answer tasks: bytes in, bytes out.

    Each process computes one task at a time. With two or more helpers, one stays free of `large`
    tasks. Tasks are ordered by the power of two of their size, smaller first, and then by age. A
    helper that ends or takes too long fails only its own task, and is replaced.
    """

    def __init__(
        self,
        name: str,
        target: str,
        argument: Any,
        *,
        size: int,
        timeout: float,
        observe: Observe = lambda _outcome, _seconds: None,
    ) -> None:
        """`target` is "package.module:function". A helper calls function(argument) once; it must
        return a function from the bytes of a task to the bytes of its answer, which may raise
        RequestError. `size` is the maximum number of processes, `timeout` the seconds that a task
        may take.
        """
        self._name = name
        self._setup = pickle.dumps((target, argument))
        self._size = size
        self._timeout = timeout
        self._observe = observe
        self._waiting: list[_Task] = []  # in the order in which helpers receive them
        self._idle: list[_Helper] = []
        self._large = 0
        self._runners: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._closed = False

    async def start(self) -> None:
        """Starts the first process without waiting for it. Others start on demand."""
        self._start_helper()

    async def close(self) -> None:
        """Ends all processes; tasks without an answer fail."""
        self._closed = True
        for runner in self._runners:
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        for task in self._waiting:
            _fail(task, f"{self._name} is shutting down")
        self._waiting.clear()

    async def run(self, *parts: Bytes, large: bool = False) -> Bytes:
        """The answer to a task; RequestError from the helper's function, or HelperError.

        The helper gets the parts as one.

        Cancelling this frees the helper, if necessary by killing its process.
        """
        if self._closed:
            raise HelperError(f"{self._name} is shutting down")
        work = _Task(parts, large, asyncio.get_running_loop().create_future())
        bisect.insort_right(self._waiting, work, key=lambda task: task.magnitude)
        self._assign()
        outcome = "answered"
        try:
            return await work.answer
        except RequestError:
            outcome = "refused"
            raise
        except HelperError:
            outcome = "failed"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            with contextlib.suppress(ValueError):
                self._waiting.remove(work)
            raise
        finally:
            self._observe(outcome, time.monotonic() - work.began)

    def _assign(self) -> None:
        """Assigns waiting tasks, in order, to idle helpers; starts a helper if none is idle."""
        at = 0
        while at < len(self._waiting) and self._idle:
            task = self._waiting[at]
            if task.large and self._large >= max(1, self._size - 1):
                at += 1
                continue
            del self._waiting[at]
            if task.answer.done():
                continue
            self._large += task.large
            helper = self._idle.pop()
            helper.task = task
            helper.wake.set()
        if len(self._waiting) > at and not self._starting:
            self._start_helper()

    def _start_helper(self) -> None:
        if self._closed or len(self._runners) >= self._size:
            return
        self._starting += 1
        runner = asyncio.create_task(self._run_helper())
        self._runners.add(runner)
        runner.add_done_callback(self._helper_ended)

    def _helper_ended(self, runner: asyncio.Task[None]) -> None:
        self._runners.discard(runner)
        if not runner.cancelled() and (error := runner.exception()) is not None:
            log.error("a helper of %s failed", self._name, exc_info=error)
        if not self._closed:
            self._assign()
            if not self._runners:
                self._start_helper()  # the next task should not wait for a process to start

    async def _run_helper(self) -> None:
        """Runs one process from its start to its end."""
        try:
            helper = await self._launch()
        finally:
            self._starting -= 1
        if helper is None:
            await asyncio.sleep(RESTART_SECONDS)
            return
        try:
            while True:
                helper.wake.clear()
                self._idle.append(helper)
                self._assign()
                ended = asyncio.create_task(helper.process.wait())
                woken = asyncio.create_task(helper.wake.wait())
                try:
                    await asyncio.wait({ended, woken}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ended.cancel()
                    woken.cancel()
                if helper.task is None or not await self._compute(helper, helper.task):
                    return
        finally:
            if helper in self._idle:
                self._idle.remove(helper)
            if helper.task is not None:  # the helper ends before it starts its task
                _fail(helper.task, f"{self._name} is shutting down")
            helper.connection.close()
            await _end(helper.process)

    async def _launch(self) -> _Helper | None:
        """A process that is ready for tasks; None if it did not start."""
        try:
            process, ours = await _spawn()
        except OSError as error:  # no file descriptors, processes or memory left
            log.error("a helper of %s did not start: %s", self._name, error)
            return None
        helper = _Helper(process, ours)
        try:
            async with asyncio.timeout(START_SECONDS):
                await _send(ours, self._setup)
                if (await _receive(ours))[0] == READY:
                    return helper
        except (OSError, EOFError):
            pass
        except BaseException:
            ours.close()
            await _end(process)
            raise
        ours.close()
        await _end(process)
        log.error("a helper of %s did not start: exit status %s", self._name, process.returncode)
        return None

    async def _compute(self, helper: _Helper, task: _Task) -> bool:
        """Computes a task; False if the helper must be replaced."""
        abandoned: asyncio.TimerHandle | None = None
        killed = False
        loop = asyncio.get_running_loop()

        def kill() -> None:
            nonlocal killed
            killed = True
            _kill(helper.process)

        def abandon(answer: asyncio.Future[Bytes]) -> None:
            nonlocal abandoned
            # May run after the task has ended here: then the helper has another task.
            if answer.cancelled() and helper.task is task:
                abandoned = loop.call_later(GRACE_SECONDS, kill)

        task.answer.add_done_callback(abandon)
        try:
            if task.answer.cancelled():
                return True
            async with asyncio.timeout(self._timeout):
                await _send(helper.connection, *task.parts)
                _settle(task, *await _receive(helper.connection))
            return not killed  # the answer may arrive at the moment of the kill
        except TimeoutError:
            log.error("a helper of %s took longer than %g s", self._name, self._timeout)
            _fail(task, f"it took longer than {self._timeout:g} s", TaskError)
        except (OSError, EOFError):
            if not task.answer.cancelled():
                log.error("a helper of %s ended while it computed a task", self._name)
            _fail(task, "the process that computed it ended", TaskError)
        except asyncio.CancelledError:
            _fail(task, f"{self._name} is shutting down")
            raise
        finally:
            task.answer.remove_done_callback(abandon)
            if abandoned is not None:
                abandoned.cancel()
            self._large -= task.large
            helper.task = None
        return False


async def _spawn() -> tuple[asyncio.subprocess.Process, socket.socket]:
    """A new process, and this side's end of the connection to it."""
    ours, its = socket.socketpair()
    ours.setblocking(False)
    try:
        with its:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pagewire.helpers.process",
                str(its.fileno()),
                pass_fds=(its.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


def _settle(task: _Task, kind: bytes, data: bytearray) -> None:
    """Sets the result of a task: its answer, or the error that the helper reports."""
    if task.answer.done():
        return
    if kind == ANSWER:
        task.answer.set_result(data)
    elif kind == REFUSAL:
        task.answer.set_exception(RequestError(*pickle.loads(data)))
    else:
        log.error("a helper failed: %s", data.decode())
        task.answer.set_exception(HelperError("it failed"))


def _fail(task: _Task, reason: str, kind: type[HelperError] = HelperError) -> None:
    if not task.answer.done():
        task.answer.set_exception(kind(reason))


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kills a process if it runs, and waits for its end."""
    if process.returncode is None:
        _kill(process)
    await process.wait()


async def _send(connection: socket.socket, *parts: Bytes) -> None:
    """Sends a frame in pieces, so that a large one does not block the event loop."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, SIZE.pack(sum(map(len, parts))))
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(part), _PIECE_BYTES):
            await loop.sock_sendall(connection, view[at : at + _PIECE_BYTES])


async def _receive(connection: socket.socket) -> tuple[bytes, bytearray]:
    """The kind and the bytes of the next frame; EOFError at the end of the connection."""
    size, kind = HEAD.unpack(await _read(connection, HEAD.size))
    return kind, await _read(connection, size)


async def _read(connection: socket.socket, size: int) -> bytearray:
    loop = asyncio.get_running_loop()
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = await loop.sock_recv_into(connection, view[at : at + _PIECE_BYTES])
        if not count:
            raise EOFError
        at += count
    return data
