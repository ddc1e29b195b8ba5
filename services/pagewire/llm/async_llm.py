"""A model whose outputs are streamed to an event loop."""

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pagewire.errors import RequestError
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.llm.batch import generations_of
from pagewire.llm.llm import body_limits
from pagewire.llm.outputs import Pieces, RequestOutput
from pagewire.llm.params import SamplingParams
from pagewire.llm.private_stack import PrivateStack
from pagewire.llm.prompts import Conversation, PromptLike, Task, chat_task, completion_task
from pagewire.llm.stack_settings import stack_values
from pagewire.v1 import inference_pb2 as pb


class AsyncLLM:
    """`LLM` for programs with an event loop: many prompts at once, each streamed.

    It starts its processes in the background; `async with` or the first call waits for them. Any
    event loop may call it, also several one after the other.
    """

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        """See `LLM`. The call that waits for the start raises its errors."""
        self._stack = PrivateStack(stack_values(model, settings))
        self._finalizer = weakref.finalize(self, self._stack.close)

    async def start(self) -> None:
        """Waits until the processes are ready; RuntimeError has the reason if one did not start."""
        await self._stack.until_connected()

    async def model(self) -> pb.Model:
        """The model: its name in `id`, and limits such as `max_model_len`."""
        return (await self._stack.until_connected()).schedulers.model(None)

    async def generate(
        self, prompt: PromptLike, params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Continues a prompt, and yields its outputs in pieces as they are generated.

        The texts of all pieces with the same `index` form one output; the last piece has
        `finished`. Leaving the loop, or cancelling its task, aborts the request. RequestError says
        why a request is refused or has failed.
        """
        model = await self.model()
        task = completion_task(prompt, _or_default(params), model, stream=True)
        async for output in self._stream(task):
            yield output

    async def chat(
        self, messages: Conversation, params: SamplingParams | None = None, **fields: Any
    ) -> AsyncIterator[RequestOutput]:
        """Answers a conversation in pieces; see `generate` and `LLM.chat`."""
        model = await self.model()
        task = chat_task(
            messages,
            _or_default(params),
            fields,
            model,
            body_limits(self._stack.values),
            stream=True,
        )
        async for output in self._stream(task):
            yield output

    async def close(self) -> None:
        """Ends the processes; open streams fail."""
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _stream(self, task: Task) -> AsyncIterator[RequestOutput]:
        schedulers = (await self._stack.until_connected()).schedulers
        mailbox = _Mailbox()
        pieces = _Stream(task, schedulers, mailbox)
        running = self._stack.start(pieces.run())
        try:
            ended = False
            while not ended:
                for output in await mailbox.take():
                    if isinstance(output, BaseException):
                        raise output
                    ended = output.finished
                    yield output
        finally:
            running.cancel()


def _or_default(params: SamplingParams | None) -> SamplingParams:
    return SamplingParams() if params is None else params


class _Stream:
    """Follows the generations of a prompt on the stack's loop."""

    def __init__(self, task: Task, schedulers: Schedulers, mailbox: "_Mailbox") -> None:
        self._task = task
        self._schedulers = schedulers
        self._mailbox = mailbox

    async def run(self) -> None:
        """Posts pieces, the last one finished, or the error that ends the stream."""
        updates: UpdateQueue[Generation] = UpdateQueue()
        generations = generations_of(self._task.job, updates, True, time.perf_counter())
        pieces = Pieces(self._task.prompt, self._task.job, generations)
        try:
            self._schedulers.submit(generations)
            ended = False
            while not ended:
                updated = await updates.take()
                for generation in updated:
                    if generation.failure is not None:
                        raise generation.failure
                output = pieces.take(updated)
                ended = output.finished
                self._mailbox.post(output)
        except RequestError as error:
            self._mailbox.post(error)
        except asyncio.CancelledError:
            self._mailbox.post(RuntimeError("this LLM was closed"))
            raise
        finally:
            for generation in generations:
                if not generation.ended:
                    self._schedulers.abort(generation)


class _Mailbox:
    """Outputs for the caller's event loop; one wake-up covers all that wait."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._outputs: list[RequestOutput | BaseException] = []
        self._filled = asyncio.Event()

    def post(self, output: RequestOutput | BaseException) -> None:
        """Adds an output, on any thread; RuntimeError if the caller's loop is closed."""
        with self._lock:
            self._outputs.append(output)
            first = len(self._outputs) == 1
        if first:
            self._loop.call_soon_threadsafe(self._filled.set)

    async def take(self) -> list[RequestOutput | BaseException]:
        """Waits for outputs, and removes all."""
        await self._filled.wait()
        self._filled.clear()
        with self._lock:
            taken, self._outputs = self._outputs, []
        return taken
