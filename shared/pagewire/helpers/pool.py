"""The helper processes of one service, and who of them computes what."""

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

# A task that is no longer wanted may end by itself for so long; then its helper is replaced.
GRACE_SECONDS = 0.5
RESTART_SECONDS = 1.0
START_SECONDS = 60.0
_PIECE_BYTES = 1 << 18

# Told of each task: how it ended ("answered", "refused", "failed" or "cancelled") and the seconds
# from `run` to its end.
Observe = Callable[[str, float], None]


class HelperError(Exception):
    """A task has no answer: its helper failed, died or took too long. The message says which."""


@dataclass(slots=True, eq=False)
class _Task:
    data: bytes
    large: bool
    answer: asyncio.Future[bytes]
    began: float = field(default_factory=time.monotonic)

    @property
    def magnitude(self) -> int:
        """Tasks of one magnitude take about as long as each other."""
        return len(self.data).bit_length()


@dataclass(slots=True, eq=False)
class _Helper:
    """One process. `task` is what it computes; `wake` is set when it has been given something."""

    process: asyncio.subprocess.Process
    connection: socket.socket
    task: _Task | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class HelperPool:
    """Processes that answer tasks: bytes in, bytes out.

    Each computes one task at a time. With two or more, one of them is always left for tasks that
    are not `large`. Smaller tasks go first, by powers of two, and the oldest first among those of
    about one size. A helper that dies or takes too long costs its task alone and is replaced.
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
        """`target` is "package.module:function". A helper calls function(argument) once. What that
        returns takes the bytes of a task and returns those of its answer; it may raise
        RequestError. `size` is the most processes, `timeout` the seconds that a task may take.
        """
        self._name = name
        self._setup = pickle.dumps((target, argument))
        self._size = size
        self._timeout = timeout
        self._observe = observe
        self._waiting: list[_Task] = []  # in the order in which they go
        self._idle: list[_Helper] = []
        self._large = 0
        self._keepers: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._closed = False

    async def start(self) -> None:
        """Starts the first process, without waiting for it; others start when they are needed."""
        self._start_helper()

    async def close(self) -> None:
        """Ends all processes; tasks that have no answer fail."""
        self._closed = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for task in self._waiting:
            _fail(task, f"{self._name} is shutting down")
        self._waiting.clear()

    async def run(self, task: bytes, large: bool = False) -> bytes:
        """The answer to a task. RequestError of the helper's function, or HelperError.

        Whoever cancels this frees the helper: a process that does not end by itself is killed.
        """
        if self._closed:
            raise HelperError(f"{self._name} is shutting down")
        work = _Task(task, large, asyncio.get_running_loop().create_future())
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
        """Gives waiting tasks, in their order, to helpers that are free; starts one if none is."""
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
        if self._closed or len(self._keepers) >= self._size:
            return
        self._starting += 1
        keeper = asyncio.create_task(self._keep_helper())
        self._keepers.add(keeper)
        keeper.add_done_callback(self._forget)

    def _forget(self, keeper: asyncio.Task[None]) -> None:
        self._keepers.discard(keeper)
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            log.error("a helper of %s could not be kept", self._name, exc_info=error)
        if not self._closed:
            self._assign()
            if not self._keepers:
                self._start_helper()  # the next task should not wait for a process to start

    async def _keep_helper(self) -> None:
        """One process, from its start to its end."""
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
            if helper.task is not None:  # it was given one, and ends before it began it
                _fail(helper.task, f"{self._name} is shutting down")
            helper.connection.close()
            await _end(helper.process)

    async def _launch(self) -> _Helper | None:
        """A process that is ready for tasks; None if it did not get so far."""
        try:
            process, ours = await _spawn()
        except OSError as error:  # no descriptors, processes or memory are left
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
        log.error("a helper of %s did not start: status %s", self._name, process.returncode)
        return None

    async def _compute(self, helper: _Helper, task: _Task) -> bool:
        """Passes the answer on; False if the helper is of no use any more."""
        abandoned: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()

        def abandon(answer: asyncio.Future[bytes]) -> None:
            nonlocal abandoned
            if answer.cancelled():
                abandoned = loop.call_later(GRACE_SECONDS, _kill, helper.process)

        task.answer.add_done_callback(abandon)
        try:
            if task.answer.cancelled():
                return True
            async with asyncio.timeout(self._timeout):
                await _send(helper.connection, task.data)
                _settle(task, *await _receive(helper.connection))
            return True
        except TimeoutError:
            log.error("a helper of %s took longer than %g s", self._name, self._timeout)
            _fail(task, f"it took longer than {self._timeout:g} s")
        except (OSError, EOFError):
            if not task.answer.cancelled():
                log.error("a helper of %s has died", self._name)
            _fail(task, "the process that computed it has died")
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
    """A process, and our end of the connection to it."""
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


def _settle(task: _Task, kind: bytes, data: bytes) -> None:
    """Hands an answer, or what a helper says instead, to whoever waits for it."""
    if task.answer.done():
        return
    if kind == ANSWER:
        task.answer.set_result(data)
    elif kind == REFUSAL:
        task.answer.set_exception(RequestError(*pickle.loads(data)))
    else:
        log.error("a helper failed: %s", data.decode())
        task.answer.set_exception(HelperError("it failed"))


def _fail(task: _Task, reason: str) -> None:
    if not task.answer.done():
        task.answer.set_exception(HelperError(reason))


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kills a process, if it lives, and waits for it: none is left behind."""
    if process.returncode is None:
        _kill(process)
    await process.wait()


async def _send(connection: socket.socket, data: bytes) -> None:
    """A frame, in pieces: a large one must not hold the loop up."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, SIZE.pack(len(data)))
    view = memoryview(data)
    for at in range(0, len(data), _PIECE_BYTES):
        await loop.sock_sendall(connection, view[at : at + _PIECE_BYTES])


async def _receive(connection: socket.socket) -> tuple[bytes, bytes]:
    """The kind and the bytes of the next frame; EOFError where there is none."""
    size, kind = HEAD.unpack(await _read(connection, HEAD.size))
    return kind, bytes(await _read(connection, size))


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
