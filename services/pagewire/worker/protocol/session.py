"""The state of one step stream, shared by the event loop and the step executor."""

import asyncio

from pagewire.errors import RequestError, invalid
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.constraints.mask_processes import MaskProcesses
from pagewire.worker.protocol.constraints.slot_masks import SlotMasks
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.slots import PlannedStep, Slots
from pagewire.worker.protocol.steps.step import decode_step

# The most steps of a stream without an answer. At this number the worker reads no further step,
# which bounds both queues. A scheduler sends far fewer steps ahead.
MAX_UNANSWERED = 64


class Session:
    """A stream: its slots, the number of its next step, and its queue of answers.

    An answer is a StepResult, a heartbeat, a Standing, a RequestError that ends the stream, or
    None, the regular end.
    """

    def __init__(
        self,
        epoch: int,
        limits: Limits,
        masks: MaskProcesses | None = None,
        shares: bool = False,
        row_costs: RowCosts | None = None,
    ) -> None:
        """`masks` None: sequences with a constraint fail. `shares`: the scheduler receives the list
        of schedulers that wait. `row_costs` of a backend that drafts."""
        self.epoch = epoch
        self.shares = shares
        # If the device makes the drafts, the text that a grammar forces is not needed.
        forced = limits.max_drafts > 0 and not limits.drafts_on_device
        matchers = None if masks is None else SlotMasks(masks, forced)
        self.slots = Slots(limits, matchers, row_costs)
        self._masks = matchers
        self.answers: asyncio.Queue[
            pb.StepResult | pb.Alive | pb.Standing | RequestError | None
        ] = asyncio.Queue()
        self.window = asyncio.Semaphore(MAX_UNANSWERED)
        self.closed = False
        self.received_steps = 0
        self._loop = asyncio.get_running_loop()
        self._next_step = 1

    async def send_heartbeats(self, interval: float) -> None:
        """Queues a heartbeat every `interval` seconds, until cancelled."""
        while True:
            await asyncio.sleep(interval)
            self.answers.put_nowait(pb.Alive(received_steps=self.received_steps))

    def plan(self, message: pb.Step) -> PlannedStep:
        """Checks and applies a step, on the launcher thread.

        RequestError INVALID_ARGUMENT if the step breaks the protocol.
        """
        if message.step != self._next_step:
            raise invalid(
                "step",
                f"step {message.step} came where step {self._next_step} was due; steps are "
                "numbered from 1 on each stream",
            )
        planned = self.slots.plan(decode_step(message))
        self._next_step += 1
        return planned

    def launched(self) -> None:
        """Call when the planned steps are launched: starts their constrained sequences."""
        if self._masks is not None:
            self._masks.send()

    def post(self, answer: pb.StepResult | RequestError | None) -> None:
        """Queues an answer, from any thread; drops it if the stream is closed."""
        if not self.closed:
            self._loop.call_soon_threadsafe(self.answers.put_nowait, answer)

    def end(self, error: RequestError) -> None:
        """Ends the stream with `error`, on the event loop. Steps in the queue are dropped."""
        self.closed = True
        self.answers.put_nowait(error)
