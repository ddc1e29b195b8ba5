"""Workers and a scheduler of one LLM, and the connection to them, on a thread of their own."""

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, TypeVar

from pagewire.addresses import parse_addresses
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.model_files import with_model_files
from pagewire.cli.launch.stack import Stack, control_stack
from pagewire.cli.launch.supervisor import SUPERVISOR, Supervisor, running
from pagewire.errors import Code, RequestError
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.rpc.credentials import NO_CREDENTIALS, SCHEDULER_TOKEN, Credentials, read_token
from pagewire.rpc.transport import open_channel
from pagewire.v1 import inference_pb2_grpc

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Starts when the scheduler is healthy, so it covers only the scheduler's answer.
_FIRST_CONTACT_SECONDS = 30.0
# The longest path of a Unix socket on Linux, less the names of the sockets.
_MAX_FOLDER_LENGTH = 80


class Connected:
    """The connection to a started stack, for coroutines on its loop."""

    def __init__(self, address: str, credentials: Credentials, schedulers: Schedulers) -> None:
        self.address = address
        self.schedulers = schedulers
        self.metadata = credentials.metadata
        self.channel = open_channel(address, credentials)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)


class PrivateStack:
    """Starts the processes at once, supervises them, and ends them in `close`.

    Its thread has an event loop of its own, so the caller's thread cannot block it. The thread must
    live as long as the processes: the kernel ends them together with the thread that started them.
    So they also end when this process is killed.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """`values` are those of `stack_values`."""
        self.values = values
        self._pid = os.getpid()
        self._connected: Future[Connected] = Future()
        self._supervisor: Supervisor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._begun = threading.Event()
        self._closed = False
        # A daemon, because the interpreter waits for other threads before it runs exit handlers.
        self._thread = threading.Thread(target=self._run, name="pagewire-llm", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running services, by name."""
        return {} if self._supervisor is None else self._supervisor.pids

    def connected(self) -> Connected:
        """Waits until all processes are ready; RuntimeError if one fails or the stack is closed."""
        self._check()
        return self._connected.result()

    async def until_connected(self) -> Connected:
        """Waits like `connected`, on the event loop of the caller."""
        self._check()
        return await asyncio.shield(asyncio.wrap_future(self._connected))

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Runs a coroutine on the stack's loop; cancelling the future cancels it."""
        try:
            self._check()
            assert self._loop is not None
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine on the stack's loop and waits for its result."""
        future = self.start(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("this LLM was closed") from None
        except BaseException:  # such as KeyboardInterrupt
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the processes and the thread; open requests fail. Does nothing the second time."""
        if self._pid != os.getpid() or not self._thread.is_alive():
            return
        self._begun.wait()
        assert self._loop is not None
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._cancel)
        # The garbage collector may call this on the thread itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _cancel(self) -> None:
        assert self._main is not None
        self._main.cancel()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError("this LLM belongs to another process; make one after the fork")
        if self._closed:
            raise RuntimeError("this LLM is closed")

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            # Not the loop of an installed policy: child processes on a thread need this one.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._serve())
        except BaseException as raised:
            error = raised
        self._closed = True
        self._begun.set()
        if not self._connected.done():
            self._connected.set_exception(_start_error(error))
        elif error is not None and not isinstance(error, asyncio.CancelledError):
            log.critical("the processes of an LLM are lost", exc_info=error)

    async def _serve(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        self._loop.set_exception_handler(_on_loop_error)
        self._begun.set()
        files = await asyncio.to_thread(with_model_files, self.values)
        with TemporaryDirectory(prefix="pagewire-", dir=_short_folder()) as folder:
            address = f"unix:{folder}/scheduler.sock"
            values = {**files, "grpc_host": address, "grpc_port": 0}
            stack = control_stack(values, Path(folder))
            self._supervisor = Supervisor(stack.tiers, _report)
            async with running(self._supervisor):
                await self._connect(stack)

    async def _connect(self, stack: Stack) -> None:
        token = read_token(self.values["scheduler_token_file"], SCHEDULER_TOKEN)
        credentials = NO_CREDENTIALS.with_token(token)
        schedulers = Schedulers(
            parse_addresses(stack.grpc_address),
            GatewayMetrics(),
            resume_seconds=self.values["resume_timeout"],
            credentials=credentials,
            max_resumes=self.values["max_resumes"],
        )
        connected = Connected(stack.grpc_address, credentials, schedulers)
        try:
            await schedulers.start()
            await schedulers.wait_until_ready(_FIRST_CONTACT_SECONDS)
            self._connected.set_result(connected)
            await asyncio.Event().wait()
        finally:
            schedulers.fail_all(RequestError(Code.UNAVAILABLE, "the LLM was closed"))
            await schedulers.close()
            await connected.channel.close()


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignores an error of gRPC after another loop of this process that used gRPC is closed: gRPC
    then delivers the last events of that loop to this loop, which cannot pass them on."""
    late = "PollerCompletionQueue" in str(context.get("handle"))
    if not (late and isinstance(context.get("exception"), RuntimeError)):
        loop.default_exception_handler(context)


def _report(name: str, line: str) -> None:
    """Logs restarts of processes as warnings, and the output of processes as information."""
    log.log(logging.WARNING if name == SUPERVISOR else logging.INFO, "%s | %s", name, line)


def _short_folder() -> str | None:
    """The folder for sockets; None for the usual folder of temporary files."""
    return None if len(gettempdir()) <= _MAX_FOLDER_LENGTH else "/tmp"


def _start_error(error: BaseException | None) -> RuntimeError:
    if isinstance(error, CommandError):
        return RuntimeError(str(error))
    if error is None or isinstance(error, asyncio.CancelledError):
        return RuntimeError("this LLM was closed before it had started")
    failure = RuntimeError(f"the LLM cannot start: {error}")
    failure.__cause__ = error
    return failure
