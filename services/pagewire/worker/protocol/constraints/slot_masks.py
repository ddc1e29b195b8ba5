"""The masks of the constrained slots of one stream.

The mask of token N+1 depends on token N, which the worker knows first. Once a step is done, its
tokens go to the mask thread (`StepMasks.advance`), which computes the next masks while the layers
of the next step run. Only sampling waits for them (`StepMasks.wait`).
"""

import time
from dataclasses import dataclass, field
from functools import partial
from threading import Condition

import numpy as np

from pagewire.limits import INT32_MAX
from pagewire.packing import Int32Array
from pagewire.worker.protocol.constraints.constraint import Constraint
from pagewire.worker.protocol.constraints.grammars import GrammarError
from pagewire.worker.protocol.constraints.mask_threads import MaskThreads
from pagewire.worker.protocol.constraints.masked_sequence import MaskedSequence
from pagewire.worker.protocol.constraints.token_bans import Words

# Seconds that sampling waits for grammars that are being compiled. A row that has none by then
# fails, so that it does not hold up the other rows for longer.
MAX_WAIT = 0.2

_TOO_SLOW = f"its grammar was not ready within {MAX_WAIT:g} s of its step"


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of some sampling rows."""

    rows: Int32Array  # [n], ascending
    words: Words  # [n, words]


@dataclass(frozen=True, slots=True)
class MaskFailure:
    """A sampling row that has no mask, and the reason as a message for users."""

    row: int
    message: str
    retryable: bool
    field: str = ""


@dataclass(slots=True, eq=False)
class MaskedSlot:
    """A constrained sequence in a slot. `ready` and `mask` change together."""

    mask: Words
    ready: int = -1  # the index of the token that `mask` is for; INT32_MAX: of any token
    sequence: MaskedSequence | None = None  # None while its grammar is being compiled
    failure: str | None = None


# A slot and what becomes of it: mask, ready, failure.
Done = tuple[MaskedSlot, Words, int, str | None]


class SlotMasks:
    """The constrained slots of one stream."""

    def __init__(self, threads: MaskThreads) -> None:
        self._threads = threads
        self._slots: dict[int, MaskedSlot] = {}
        self._changed = Condition()  # some mask is ready
        self._all = np.full(threads.grammars.words, -1, np.int32)  # allows every token

    def start(
        self, slot: int, constraint: Constraint, prompt: Int32Array, output: Int32Array
    ) -> None:
        """Gives a slot a constrained sequence; its grammar is compiled in the background."""
        masked = self._slots[slot] = MaskedSlot(self._all)
        self._threads.compile(partial(self._begin, masked, constraint, prompt, output))

    def of_step(self, rows: Int32Array, slots: Int32Array, indices: Int32Array) -> "StepMasks":
        """The masks of a step.

        Args:
            rows: `[n]`, the constrained sampling rows.
            slots: `[n]`, their slots.
            indices: `[n]`, the indices of their tokens in the outputs.
        """
        return StepMasks(self, rows, [self._slots[s] for s in slots.tolist()], indices.tolist())

    def wait(self, step: "StepMasks") -> RowMasks:
        """See `StepMasks.wait`."""
        pairs = list(zip(step.slots, step.indices, strict=True))
        deadline = time.monotonic() + MAX_WAIT
        with self._changed:
            while late := [masked for masked, index in pairs if masked.ready < index]:
                # The tokens before may take as long as their step does; compiling may not.
                compiling = all(masked.sequence is None for masked in late)
                left = deadline - time.monotonic() if compiling else None
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            for row, (masked, index) in zip(step.rows.tolist(), pairs, strict=True):
                if masked.ready < index:
                    self._free(masked)
                    step.failures.append(MaskFailure(row, _TOO_SLOW, retryable=True))
                elif masked.failure is not None:
                    step.failures.append(MaskFailure(row, masked.failure, retryable=False))
            return RowMasks(step.rows, np.stack([masked.mask for masked in step.slots]))

    def advance(self, step: "StepMasks", tokens: list[int]) -> None:
        """Computes the masks after `tokens`, one for each row of `step`, on the mask thread."""
        self._threads.post(partial(self._advance, step.slots, tokens))

    def abandon(self, step: "StepMasks") -> None:
        """See `StepMasks.abandon`."""
        with self._changed:
            for masked in step.slots:
                self._free(masked)
            self._changed.notify_all()

    def _free(self, masked: MaskedSlot) -> None:
        """Lets later steps draw any token, because none of them will be used."""
        masked.ready, masked.mask = INT32_MAX, self._all

    def _begin(
        self, masked: MaskedSlot, constraint: Constraint, prompt: Int32Array, output: Int32Array
    ) -> None:
        try:
            sequence = MaskedSequence(constraint, self._threads.grammars, prompt, output)
        except GrammarError as error:
            self._publish([(masked, self._all, INT32_MAX, str(error))])
            return
        masked.sequence = sequence
        self._compute([masked], [])

    def _advance(self, slots: list[MaskedSlot], tokens: list[int]) -> None:
        """Takes a token of each of `slots`, on the mask thread."""
        going = []
        done: list[Done] = []
        for masked, token in zip(slots, tokens, strict=True):
            sequence = masked.sequence
            if masked.ready == INT32_MAX or sequence is None:
                continue
            if token < 0:  # its row failed, so its sequence has left
                done.append((masked, self._all, INT32_MAX, None))
                continue
            try:
                sequence.advance(token)
            except GrammarError as error:
                done.append((masked, self._all, INT32_MAX, str(error)))
            else:
                going.append(masked)
        self._compute(going, done)

    def _compute(self, slots: list[MaskedSlot], done: list[Done]) -> None:
        """Computes the masks of the next tokens of `slots`; publishes them, and what is `done`."""
        masks = np.full((len(slots), len(self._all)), -1, np.int32)
        sequences = [masked.sequence for masked in slots]
        matchers = [
            (sequence.matcher, row)
            for row, sequence in enumerate(sequences)
            if sequence is not None and not sequence.ended and sequence.matcher is not None
        ]
        if matchers:
            self._threads.fill(matchers, masks)
        for masked, sequence, mask in zip(slots, sequences, masks, strict=True):
            assert sequence is not None
            if sequence.ended:
                done.append((masked, self._all, INT32_MAX, None))
                continue
            try:
                sequence.narrow(mask)
            except GrammarError as error:
                done.append((masked, self._all, INT32_MAX, str(error)))
            else:
                done.append((masked, mask, sequence.index, None))
        self._publish(done)

    def _publish(self, done: list[Done]) -> None:
        with self._changed:
            for masked, mask, ready, failure in done:
                if masked.ready != INT32_MAX:  # else given up
                    masked.mask, masked.ready, masked.failure = mask, ready, failure
            self._changed.notify_all()


@dataclass(slots=True, eq=False)
class StepMasks:
    """The masks of one step: a backend waits for them, the executor hands on the tokens."""

    owner: SlotMasks
    rows: Int32Array  # [n], ascending
    slots: list[MaskedSlot]
    indices: list[int]
    failures: list[MaskFailure] = field(default_factory=list)

    def wait(self) -> RowMasks:
        """The masks, once they are known. A failed row, noted in `failures`, has any token."""
        return self.owner.wait(self)

    def advance(self, tokens: Int32Array) -> None:
        """Hands on the tokens of all sampling rows, -1 for a failed one."""
        self.owner.advance(self, tokens[self.rows].tolist())

    def abandon(self) -> None:
        """The step has failed, and with it the sequences: later steps do not wait for them."""
        self.owner.abandon(self)
