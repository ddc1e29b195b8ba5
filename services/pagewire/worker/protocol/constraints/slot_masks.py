"""The masks of the constrained slots of one stream.

The mask of token N+1 depends on token N, which the worker samples. After each step its tokens go to
the mask processes (`StepMasks.advance`), which compute the next masks while the layers of the next
step run. Only sampling waits for the masks (`StepMasks.wait`).
"""

import time
from collections import deque
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array, pack
from pagewire.worker.protocol.constraints.constraint import Constraint
from pagewire.worker.protocol.constraints.mask_memory import last_stamp
from pagewire.worker.protocol.constraints.mask_processes import MaskProcesses
from pagewire.worker.protocol.constraints.mask_server import Start
from pagewire.worker.protocol.constraints.masked_sequence import PROMPT_TAIL
from pagewire.worker.protocol.constraints.token_bans import Words

# Seconds that sampling waits for grammars that are being compiled. After that the row fails, so
# that it does not delay the other rows further.
MAX_WAIT = 0.2

_TOO_SLOW = f"its grammar was not ready within {MAX_WAIT:g} s of its step"


@dataclass(frozen=True, slots=True)
class MaskFailure:
    """A sampling row that has no mask, and the reason as a message for users."""

    row: int
    message: str
    retryable: bool
    field: str = ""


class SlotMasks:
    """The constrained slots of one stream."""

    def __init__(self, processes: MaskProcesses, drafts: bool = False) -> None:
        """`drafts`: whether `StepMasks.forced` will be called."""
        slots = processes.memory.slots
        self._drafts = drafts
        self._processes = processes
        self.memory = processes.memory
        self._generations = np.zeros(slots, np.int64)  # of the slots' sequences
        # The last stamps of sequences that were given up. Their processes will write them, too.
        self._given_up = np.zeros(slots, np.int64)
        # Sequences that have a slot, and whose mask process does not know them yet.
        self._starts: deque[Start] = deque()
        self._sending = Lock()  # so that sequences of a slot are sent in order

    def start(
        self, slot: int, constraint: Constraint, prompt: Int32Array, output: Int32Array
    ) -> None:
        """Assigns a slot to a constrained sequence, which `send` sends to a mask process.

        A thread that plans does not send: it would lose the interpreter's lock before its launch.
        """
        generation = self._processes.next_generation(slot)
        self._generations[slot] = generation
        tail, known = pack(prompt[-PROMPT_TAIL:]), pack(output)
        self._starts.append(Start(slot, generation, constraint, tail, known, self._drafts))

    def send(self) -> None:
        """Sends the sequences of `start` to their mask processes, from any thread."""
        if not self._starts:
            return
        with self._sending:
            starts = [self._starts.popleft() for _ in range(len(self._starts))]
            self._processes.start(starts)

    def of_step(self, rows: Int32Array, slots: Int32Array, indices: Int32Array) -> "StepMasks":
        """The masks of a step.

        Args:
            rows: `[n]`, the constrained sampling rows.
            slots: `[n]`, their slots.
            indices: `[n]`, the indices of their tokens in the outputs.
        """
        of = self.of_rows(rows, slots)
        return StepMasks(self, rows, slots, of.firsts, of.sent, of.firsts + indices)

    def of_rows(self, rows: Int32Array, slots: Int32Array) -> "MaskedRows":
        """The constrained sampling rows `[n]` of steps, whose slots are `slots [n]`.

        The result is valid for all steps with these rows, until a slot gets a new sequence.
        """
        generations = self._generations[slots]
        sent = np.empty((len(slots), 3), np.int32)
        sent[:, 0], sent[:, 1], sent[:, 2] = slots, generations, -1
        return MaskedRows(self, rows, slots, generations << 32, sent)

    def wait(self, step: "StepMasks") -> None:
        """See `StepMasks.wait`."""
        self.send()
        late = self._wait(step)
        failed = np.flatnonzero(self.memory.failed[step.slots] << 32 == step.firsts)
        if len(late):
            failed = np.setdiff1d(failed, late)
        for row in failed.tolist():
            message, name = self.memory.failure(int(step.slots[row]))
            step.failures.append(MaskFailure(int(step.rows[row]), message, False, name))

    def _wait(self, step: "StepMasks") -> NDArray[np.int64]:
        """Waits, and returns the rows that it has given up."""
        late: NDArray[np.int64] = np.empty(0, np.int64)
        if (self.memory.ready[step.slots] >= step.stamps).all():  # as after a step on a GPU
            return late
        deadline = time.monotonic() + MAX_WAIT

        def awaited() -> tuple[int, float | None] | None:
            nonlocal late
            late = np.flatnonzero(self._reached(step.slots, self.memory.ready) < step.stamps)
            if not len(late):
                return None
            slots = step.slots[late]
            compiled = self.memory.ready[slots] >= step.firsts[late]
            # Earlier tokens may take as long as their step does; compiling may not.
            left = None if compiled.any() else deadline - time.monotonic()
            return self._processes.of_slot(int(slots[compiled.argmax()])), left

        self._processes.masks_known.wait_for(awaited)
        if len(late):
            self._give_up(step, late)
            rows = step.rows[late].tolist()
            step.failures += [MaskFailure(row, _TOO_SLOW, retryable=True) for row in rows]
        return late

    def compiles(self, step: "StepMasks") -> bool:
        """See `StepMasks.compiles`."""
        return bool((self._reached(step.slots, self.memory.ready) < step.firsts).any())

    def forced(self, step: "StepMasks") -> dict[int, list[int]]:
        """See `StepMasks.forced`."""
        memory, deadline = self.memory, time.monotonic() + MAX_WAIT

        def awaited() -> tuple[int, float] | None:
            # Only for earlier tokens, not for masks and not for compiling.
            taken = self._reached(step.slots, memory.taken)
            late = (taken < step.stamps) & (memory.ready[step.slots] >= step.firsts)
            if not late.any():
                return None
            slot = int(step.slots[late.argmax()])
            return self._processes.of_slot(slot), deadline - time.monotonic()

        self._processes.forced_known.wait_for(awaited)
        known = memory.taken[step.slots] == step.stamps
        return {
            slot: memory.forced[slot, : memory.forced_counts[slot]].tolist()
            for slot in step.slots[known].tolist()
            if memory.forced_counts[slot]
        }

    def advance(self, step: "StepMasks", tokens: Int32Array) -> None:
        """Computes the masks after `tokens [n]`, one for each row of `step`."""
        rows = step.sent.copy()
        rows[:, 2] = tokens
        self._processes.advance(rows)

    def abandon(self, step: "StepMasks") -> None:
        """See `StepMasks.abandon`."""
        self._give_up(step, np.arange(len(step.slots)))
        self._processes.masks_known.set()
        self._processes.forced_known.set()

    def _reached(self, slots: Int32Array, stamps: NDArray[np.int64]) -> NDArray[np.int64]:
        """The stamps `[n]` that slots have reached; no thread waits for an earlier one."""
        return np.maximum(stamps[slots], self._given_up[slots])

    def _give_up(self, step: "StepMasks", rows: NDArray[np.intp]) -> None:
        """Allows later steps any token for some rows of `step`: their tokens are not used."""
        sent = step.sent[rows]
        for slot, generation, _ in sent.tolist():
            if self._generations[slot] == generation:
                self._given_up[slot] = last_stamp(generation)
        self._processes.advance(sent)


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRows:
    """The constrained sampling rows of a step, and of later ones with the same rows."""

    owner: SlotMasks
    rows: Int32Array  # [n], ascending
    slots: Int32Array  # [n], the rows of `StepMasks.words` that have their masks
    firsts: NDArray[np.int64]  # [n], the stamps of the first tokens of the sequences
    sent: Int32Array  # [n, 3], rows that give up the sequences, see `MaskProcesses.advance`

    def at(self, indices: Int32Array) -> "StepMasks":
        """The masks of a step; `indices` are those of all sampling rows' tokens in the outputs."""
        stamps = self.firsts + indices[self.rows]
        return StepMasks(self.owner, self.rows, self.slots, self.firsts, self.sent, stamps)


@dataclass(slots=True, eq=False)
class StepMasks:
    """The masks of one step: a backend waits for them, the executor passes the tokens on."""

    owner: SlotMasks
    rows: Int32Array  # [n], ascending
    slots: Int32Array  # [n], the rows of `words` that have their masks
    firsts: NDArray[np.int64]  # [n], the stamps of the first tokens of the sequences
    sent: Int32Array  # [n, 3], see `MaskedRows`
    stamps: NDArray[np.int64]  # [n], of the tokens that the masks are for
    failures: list[MaskFailure] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)
    _known: bool = False

    @property
    def words(self) -> Words:
        """The masks of all slots, `[slots, words]`."""
        return self.owner.memory.masks

    def forced(self) -> dict[int, list[int]]:
        """The forced next tokens, by slot, of rows whose grammars force a text.

        They may be wrong, because the same text may have other tokens. Waits for the tokens before
        them.
        """
        return self.owner.forced(self)

    def wait(self) -> None:
        """Waits for the masks. A failed row is added to `failures`; its token has no meaning."""
        with self._lock:
            if not self._known:
                self.owner.wait(self)
                self._known = True

    def compiles(self) -> bool:
        """Whether a grammar is still being compiled, so that its row may fail."""
        return self.owner.compiles(self)

    def advance(self, tokens: Int32Array) -> None:
        """Sends the tokens of all sampling rows to the mask processes, -1 for a failed row."""
        self.owner.advance(self, tokens[self.rows])

    def abandon(self) -> None:
        """Gives up the sequences of a failed step: later steps do not wait for their masks."""
        self.owner.abandon(self)
