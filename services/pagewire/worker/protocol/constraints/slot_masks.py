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
from llguidance import LLMatcher

from pagewire.limits import INT32_MAX
from pagewire.packing import Int32Array
from pagewire.worker.protocol.constraints.constraint import Constraint
from pagewire.worker.protocol.constraints.grammars import GrammarError
from pagewire.worker.protocol.constraints.mask_table import MaskTable
from pagewire.worker.protocol.constraints.mask_threads import MaskThreads
from pagewire.worker.protocol.constraints.masked_sequence import MaskedSequence
from pagewire.worker.protocol.constraints.token_bans import Words

# Seconds that sampling waits for grammars that are being compiled. A row that has none by then
# fails, so that it does not hold up the other rows for longer.
MAX_WAIT = 0.2

_TOO_SLOW = f"its grammar was not ready within {MAX_WAIT:g} s of its step"


@dataclass(frozen=True, slots=True)
class MaskFailure:
    """A sampling row that has no mask, and the reason as a message for users."""

    row: int
    message: str
    retryable: bool
    field: str = ""


@dataclass(slots=True, eq=False)
class MaskedSlot:
    """A constrained sequence in a slot; its mask is the slot's row of the table."""

    slot: int
    ready: int = -1  # the index of the token that the mask is for; INT32_MAX: of any token
    sequence: MaskedSequence | None = None  # None while its grammar is being compiled
    failure: GrammarError | None = None
    # Tokens that must come next as far as is known, from the index `taken` on.
    forced: list[int] = field(default_factory=list)
    taken: int = -1


class SlotMasks:
    """The constrained slots of one stream."""

    def __init__(self, threads: MaskThreads, drafts: bool = False) -> None:
        """`drafts`: whether `StepMasks.forced` is asked for."""
        self._drafts = drafts
        self.table: MaskTable = threads.table
        self._threads = threads
        self._slots: dict[int, MaskedSlot] = {}
        self._changed = Condition()  # some mask is ready

    def start(
        self, slot: int, constraint: Constraint, prompt: Int32Array, output: Int32Array
    ) -> None:
        """Gives a slot a constrained sequence; its grammar is compiled in the background."""
        masked = self._slots[slot] = MaskedSlot(slot)
        self.table.take(slot, masked)
        self._threads.compile(partial(self._begin, masked, constraint, prompt, output))

    def of_step(self, rows: Int32Array, slots: Int32Array, indices: Int32Array) -> "StepMasks":
        """The masks of a step.

        Args:
            rows: `[n]`, the constrained sampling rows.
            slots: `[n]`, their slots.
            indices: `[n]`, the indices of their tokens in the outputs.
        """
        masked = [self._slots[slot] for slot in slots.tolist()]
        return StepMasks(self, rows, slots, masked, indices.tolist())

    def wait(self, step: "StepMasks") -> None:
        """See `StepMasks.wait`."""
        pairs = list(zip(step.masked, step.indices, strict=True))
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
                elif (error := masked.failure) is not None:
                    failure = MaskFailure(row, str(error), retryable=False, field=error.field)
                    step.failures.append(failure)

    def forced(self, step: "StepMasks") -> dict[int, list[int]]:
        """See `StepMasks.forced`."""
        pairs = list(zip(step.masked, step.indices, strict=True))

        def late() -> bool:
            return any(
                m.taken < i and m.ready != INT32_MAX and m.sequence is not None for m, i in pairs
            )

        with self._changed:
            # Only for the tokens before, not for masks and not for compiling.
            self._changed.wait_for(lambda: not late(), MAX_WAIT)
            return {m.slot: m.forced for m, i in pairs if m.taken == i and m.forced}

    def advance(self, step: "StepMasks", tokens: list[int]) -> None:
        """Computes the masks after `tokens`, one for each row of `step`, on the mask thread."""
        self._threads.post(partial(self._advance, step.masked, tokens))

    def abandon(self, step: "StepMasks") -> None:
        """See `StepMasks.abandon`."""
        with self._changed:
            for masked in step.masked:
                self._free(masked)
            self._changed.notify_all()

    def _free(self, masked: MaskedSlot, failure: GrammarError | None = None) -> None:
        """Lets later steps draw any token: none of them will be used, or there is a `failure`."""
        if self.table.holds(masked.slot, masked):
            self.table.words[masked.slot] = -1
        if masked.ready != INT32_MAX:
            masked.ready, masked.failure = INT32_MAX, failure
            masked.sequence = None  # others get its lexer

    def _begin(
        self, masked: MaskedSlot, constraint: Constraint, prompt: Int32Array, output: Int32Array
    ) -> None:
        """Compiles the grammar of a sequence and computes its first mask, on a compiler thread."""
        mask = np.full(self.table.words.shape[1], -1, np.int32)
        try:
            sequence = MaskedSequence(constraint, self._threads.grammars, prompt, output)
            if not sequence.ended:
                if sequence.matcher is not None:
                    self._threads.fill([(sequence.matcher, 0)], mask[None])
                sequence.narrow(mask)
            if self._drafts:
                masked.forced, masked.taken = sequence.forced_tokens(), sequence.index
        except GrammarError as error:
            self._threads.post(partial(self._fail, masked, error))
        else:
            self._threads.post(partial(self._place, masked, sequence, mask))

    def _fail(self, masked: MaskedSlot, error: GrammarError) -> None:
        with self._changed:
            self._free(masked, error)
            self._changed.notify_all()

    def _place(self, masked: MaskedSlot, sequence: MaskedSequence, mask: Words) -> None:
        """Takes over the first mask of a sequence, on the mask thread."""
        with self._changed:
            if masked.ready == INT32_MAX or not self.table.holds(masked.slot, masked):
                return
            self.table.words[masked.slot] = mask
            if sequence.ended:
                masked.ready = INT32_MAX
            else:
                masked.sequence, masked.ready = sequence, sequence.index
            self._changed.notify_all()

    def _advance(self, slots: list[MaskedSlot], tokens: list[int]) -> None:
        """Takes a token of each of `slots` and computes their next masks, on the mask thread."""
        words, holders = self.table.words, self.table.holders
        going: list[tuple[MaskedSlot, MaskedSequence]] = []
        over: list[tuple[MaskedSlot, GrammarError | None]] = []
        noted: list[tuple[MaskedSlot, MaskedSequence, int]] = []
        to_consume: list[tuple[LLMatcher, int]] = []  # of `noted`
        for masked, token in zip(slots, tokens, strict=True):
            sequence = masked.sequence
            if sequence is None:
                continue
            if token < 0 or holders[masked.slot] is not masked:
                over.append((masked, None))  # its row failed, so its sequence has left
                continue
            if (matcher := sequence.note(token)) is not None:
                noted.append((masked, sequence, token))
                to_consume.append((matcher, token))
                continue
            try:
                sequence.advance(token)
            except GrammarError as error:
                over.append((masked, error))
            else:
                if sequence.ended:
                    over.append((masked, None))
                else:
                    going.append((masked, sequence))
        for (masked, sequence, token), taken in zip(
            noted, self._threads.consume(to_consume), strict=True
        ):
            try:
                sequence.settle(token, taken)
            except GrammarError as error:
                over.append((masked, error))
            else:
                going.append((masked, sequence))
        if self._drafts and going:
            with self._changed:
                for masked, sequence in going:
                    masked.forced, masked.taken = sequence.forced_tokens(), sequence.index
                self._changed.notify_all()
        # Sorted by lexer: matchers that share one come one after the other, so that one thread
        # computes their masks.
        matchers = [
            (sequence.lexer, masked.slot, matcher)
            for masked, sequence in going
            if (matcher := sequence.matcher) is not None
        ]
        if matchers:
            matchers.sort()  # no two have one slot
            self._threads.fill([(matcher, slot) for _, slot, matcher in matchers], words)
        for masked, sequence in going:
            try:
                sequence.narrow(words[masked.slot])
            except GrammarError as error:
                over.append((masked, error))
        with self._changed:
            for masked, sequence in going:
                if masked.ready != INT32_MAX:  # else given up
                    masked.ready = sequence.index
            for masked, failure in over:
                self._free(masked, failure)
            self._changed.notify_all()


@dataclass(slots=True, eq=False)
class StepMasks:
    """The masks of one step: a backend waits for them, the executor hands on the tokens."""

    owner: SlotMasks
    rows: Int32Array  # [n], ascending
    slots: Int32Array  # [n], the rows of `words` that have their masks
    masked: list[MaskedSlot]
    indices: list[int]
    failures: list[MaskFailure] = field(default_factory=list)

    @property
    def words(self) -> Words:
        """The masks of all slots, `[slots, words]`."""
        return self.owner.table.words

    def forced(self) -> dict[int, list[int]]:
        """The next tokens of rows whose grammars force some, by slot, as the tokenizer cuts them.

        They are guesses: the same text may be cut in other ways. Waits for the tokens before them.
        """
        return self.owner.forced(self)

    def wait(self) -> None:
        """Returns once the masks are known. A failed row, noted in `failures`, has any token."""
        self.owner.wait(self)

    def advance(self, tokens: Int32Array) -> None:
        """Hands on the tokens of all sampling rows, -1 for a failed one."""
        self.owner.advance(self, tokens[self.rows].tolist())

    def abandon(self) -> None:
        """The step has failed, and with it the sequences: later steps do not wait for them."""
        self.owner.abandon(self)
