"""One step stream, as seen from both sides: the event loop's and the engine's."""

import asyncio

from pagewire.errors import RequestError, invalid
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.slots import PlannedStep, Slots
from pagewire.worker.protocol.steps.step import decode_step

# Steps of a stream that may wait for their answer to be sent; after that no more are read, so
# that neither queue grows without bound. Run-ahead is far below it.
MAX_UNANSWERED = 64


class Session:
    """A stream: its slots, the number of its next step, and its answers on their way out.

    An answer is a StepResult, a sign of life, a RequestError that ends the stream, or None: its
    regular end.
    """

    def __init__(self, epoch: int, limits: Limits) -> None:
        self.epoch = epoch
        self.slots = Slots(limits)
        self.answers: asyncio.Queue[pb.StepResult | pb.Alive | RequestError | None] = (
            asyncio.Queue()
        )
        self.window = asyncio.Semaphore(MAX_UNANSWERED)
        self.closed = False
        self.received_steps = 0
        self._loop = asyncio.get_running_loop()
        self._next_step = 1

    async def say_alive(self, interval: float) -> None:
        """Queues a sign of life every `interval` seconds, until cancelled."""
        while True:
            await asyncio.sleep(interval)
            self.answers.put_nowait(pb.Alive(received_steps=self.received_steps))

    def plan(self, message: pb.Step) -> PlannedStep:
        """On the engine's thread: applies a step; RequestError if it breaks the protocol."""
        if message.step != self._next_step:
            raise invalid(
                "step",
                f"step {message.step} came where step {self._next_step} was due; steps are "
                "numbered from 1 on each stream",
            )
        planned = self.slots.plan(decode_step(message))
        self._next_step += 1
        return planned

    def post(self, answer: pb.StepResult | RequestError | None) -> None:
        """From any thread: queues an answer, unless the stream is gone."""
        if not self.closed:
            self._loop.call_soon_threadsafe(self.answers.put_nowait, answer)

    def end(self, error: RequestError) -> None:
        """On the event loop: computes no further step, and ends the stream with `error`."""
        self.closed = True
        self.answers.put_nowait(error)
