"""A `Backend` whose device is an external program.

A sequence starts when its prompt is complete: the program gets one line, and sends tokens at its
own pace. A step takes one token of each of its sequences, and waits for sequences without one.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import isclose
from typing import Any

import numpy as np

from pagewire.errors import quoted
from pagewire.packing import Int32Array
from pagewire.sampling import NUMBERS
from pagewire.v1 import worker_pb2 as worker_pb
from pagewire.worker.command.messages import Generate, NonsenseError, Ready, cancel_line, read_piece
from pagewire.worker.command.program import Program
from pagewire.worker.command.sequences import Failure, LiveSequence
from pagewire.worker.command.text import ProgramText
from pagewire.worker.protocol.backend import HostCosts, Outcome, RowFailure
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import Start, StepHostCopies, StepSampling

log = logging.getLogger(__name__)

# While sequences run, the scheduler sends a step as soon as one is answered. After this many
# seconds without a step, the scheduler has ended them; the protocol has no message for that.
IDLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Running:
    """A submitted step: the sequence of each row."""

    rows: list[LiveSequence]


class CommandBackend:
    """The methods of `Backend` are documented there; one lock guards all sequences."""

    synchronous = False
    pooling: worker_pb.Pooling | None = None
    prefix_groups = False
    weight_bytes = 0
    kv_cache_bytes = 0
    host_costs: HostCosts | None = None
    row_costs: RowCosts | None = None
    piggyback_tokens = 0
    mask_memory = None  # a program draws its tokens itself

    def __init__(
        self, command: Sequence[str], start_seconds: float, silence: float, longest: float
    ) -> None:
        """A program hangs if it sends nothing for `silence` seconds while a step waits for it. If
        it sends nothing for one sequence in twice that time, that sequence fails. A step takes
        `longest` seconds at most."""
        self._silence, self._longest = silence, longest
        self._program = Program(command, start_seconds, self._on_line, self._on_end)
        self._ready = Ready()
        self._text: ProgramText | None = None
        self._limits: Limits | None = None
        self._end_token: int | None = None
        self._defaults: Mapping[str, Any] = {}
        self._changed = threading.Condition()
        self._starts: dict[int, Start] = {}  # by slot, until their prompts are complete
        self._live: dict[int, LiveSequence] = {}  # by slot
        self._by_id: dict[str, LiveSequence] = {}
        self._ids = count(1)
        self._last_id = 0
        self._num_open = 0  # steps submitted and not answered
        self._answered_at = 0.0
        self._tidier = threading.Thread(target=self._tidy, name="tidier", daemon=True)

    def start(self) -> Ready:
        """Starts the program; RuntimeError says why it cannot."""
        self._ready = self._program.start()
        return self._ready

    def configure(
        self,
        limits: Limits,
        end_token: int | None,
        defaults: Mapping[str, Any],
        text: ProgramText | None,
    ) -> None:
        """Sets the properties of the model. `defaults` are its sampling parameters for requests
        that do not set them. `text` is needed only if the program reads or writes text."""
        self._limits, self._end_token, self._text = limits, end_token, text
        self._defaults = defaults
        self._tidier.start()

    def close(self) -> None:
        """Ends the program."""
        self._program.close()

    def warm_up(self) -> None:
        """Does nothing: the program was started before."""

    def copy(self, copies: StepHostCopies) -> None:
        """Never called: there are no blocks in host memory."""

    def scrub(self, blocks: Int32Array) -> None:
        """Does nothing: there is no KV."""

    def is_fatal(self, error: BaseException) -> bool:
        """Never: a program that ends is started again."""
        return False

    def submit(self, plan: DevicePlan) -> Running:
        """Sends new sequences to the program, and drops sequences that have no row any more."""
        with self._changed:
            if plan.starts is not None:
                for start in plan.starts.sequences:
                    self._starts[start.slot] = start
            slots = plan.sample_slots.tolist()
            # A sequence that runs has a row in every step.
            for slot in self._live.keys() - set(slots):
                self._drop(slot)
            for slot in slots[plan.num_decodes :]:  # chunks that complete a prompt
                self._begin(slot)
            rows = [self._live.get(slot) or self._lost(slot) for slot in slots]
            for sequence in rows:
                sequence.num_rows += 1
            self._num_open += 1
            return Running(rows)

    def wait(self, handle: Running) -> Outcome:
        """Takes one token for each row, and waits for the program if a row has none."""
        began = time.monotonic()
        with self._changed:
            while missing := [each for each in handle.rows if not each.answerable]:
                left = self._deadline(began) - time.monotonic()
                if left <= 0:
                    self._give_up(missing)
                    break
                self._changed.wait(left)
            tokens = np.full(len(handle.rows), -1, np.int32)
            failures = []
            for row, sequence in enumerate(handle.rows):
                if sequence.tokens or sequence.failure is None:
                    tokens[row] = sequence.take()
                else:
                    failed = sequence.failure
                    failures.append(RowFailure(row, failed.message, failed.retryable, failed.field))
                sequence.num_rows -= 1
                if sequence.dropped and not sequence.num_rows:
                    self._cancel(sequence)
            self._num_open -= 1
            self._answered_at = time.monotonic()
            self._changed.notify_all()
        seconds = time.monotonic() - began
        return Outcome(tokens, tuple(failures), round(seconds * 1e6))

    def _begin(self, slot: int) -> None:
        """Sends a sequence with a complete prompt to the program, if the program can run it."""
        assert self._limits is not None
        if slot in self._live:
            self._drop(slot)
        start = self._starts.pop(slot)
        self._last_id = next(self._ids)
        name = str(self._last_id)
        sequence = LiveSequence.of(name, start, self._end_token, self._limits.vocab_size)
        self._live[slot] = self._by_id[name] = sequence
        sampling = given_sampling(start.sampling)
        sequence.failure = unmet(sampling, start, self._ready, self._defaults)
        if sequence.failure is None:
            self._program.send(self._generate(name, start, sampling).line())

    def _generate(self, name: str, start: Start, sampling: Mapping[str, Any]) -> Generate:
        known = start.token_ids.tolist()
        prompt = known[: len(known) - start.num_generated]
        output = known[len(prompt) :]
        texts = self._ready.reads_text
        if texts:
            assert self._text is not None
        return Generate(
            name,
            self._text.decode(prompt) if texts and self._text else prompt,
            self._text.decode(output) if texts and self._text else output,
            start.max_new_tokens,
            list(start.end_token_ids),
            {**sampling, "seed": start.sampling.seed},
        )

    def _drop(self, slot: int) -> None:
        """Ends a sequence that no later step contains; steps that contain it are answered first."""
        sequence = self._live.pop(slot)
        sequence.dropped = True
        if not sequence.num_rows:
            self._cancel(sequence)

    def _cancel(self, sequence: LiveSequence) -> None:
        del self._by_id[sequence.id]
        if not sequence.closed:
            self._program.send(cancel_line(sequence.id))

    def _lost(self, slot: int) -> LiveSequence:
        """A failed sequence in place of one that was cancelled too early."""
        message = "the sequence was taken back from the program, because no step came"
        lost = LiveSequence("", 0, 0, None, 0)
        lost.failure = Failure(f"slot {slot}: {message}", retryable=True)
        return lost

    def _deadline(self, began: float) -> float:
        """The time when a step that waits since `began` gives up. While the program starts again,
        only `longest` limits the step."""
        longest = began + self._longest
        if not self._program.started:
            return longest
        began = max(began, self._program.started_at)
        # A program that sends lines for other sequences does not hang, but no sequence may wait
        # forever.
        silent = max(began, self._program.last_line_at) + self._silence
        return min(silent, began + 2 * self._silence, longest)

    def _give_up(self, missing: list[LiveSequence]) -> None:
        """Fails the sequences that have had no token for too long."""
        what, retryable = f"wrote nothing for {self._silence:g} s", True
        if not self._program.started:
            what = f"has not started again within {self._longest:g} s"
        elif time.monotonic() >= self._program.last_line_at + self._silence:
            self._program.restart(what)
            missing = list(self._by_id.values())
        else:  # a restart would delay the other sequences again
            what, retryable = "wrote nothing for this request, while it served others", False
        for sequence in missing:
            if not sequence.answerable:
                sequence.failure = Failure(f"the program {what}", retryable)

    def _on_line(self, line: bytes) -> None:
        piece = read_piece(line)
        with self._changed:
            sequence = self._by_id.get(piece.id)
            if sequence is None:
                if not (piece.id.isdecimal() and 0 < int(piece.id) <= self._last_id):
                    raise NonsenseError(f"it never got the id {quoted(piece.id)}")
                return  # the sequence was cancelled meanwhile
            sequence.receive(piece, self._text if self._ready.writes_text else None)
            self._changed.notify_all()

    def _on_end(self, reason: str) -> None:
        """Fails the sequences of a program that has ended; they may be retried."""
        with self._changed:
            for sequence in self._by_id.values():
                if not sequence.ended and sequence.failure is None:
                    sequence.failure = Failure(reason, retryable=True)
            self._changed.notify_all()

    def _tidy(self) -> None:
        """Drops sequences that the scheduler has ended."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._live and self._num_open == 0)
                left = self._answered_at + IDLE_SECONDS - time.monotonic()
                if left <= 0:
                    for slot in list(self._live):
                        self._drop(slot)
                    continue
            time.sleep(left)


def given_sampling(sampling: StepSampling) -> dict[str, Any]:
    """The parameters that differ from their neutral values, by their names in the API."""
    given: dict[str, Any] = {
        number.name: getattr(sampling, number.name)
        for number in NUMBERS
        if getattr(sampling, number.name) != number.default
    }
    if sampling.min_tokens:
        given["min_tokens"] = sampling.min_tokens
    if len(sampling.bias_ids):
        ids, biases = sampling.bias_ids.tolist(), sampling.biases.tolist()
        given["logit_bias"] = {str(token): bias for token, bias in zip(ids, biases, strict=True)}
    return given


def unmet(
    given: Mapping[str, Any], start: Start, ready: Ready, defaults: Mapping[str, Any]
) -> Failure | None:
    """Why a program cannot run a sequence with its parameters; None if it can.

    A value equal to the model's default does not count as set by the client.
    """
    for name, wanted in (
        ("logprobs", start.sampling.logprobs is not None),
        ("prompt_logprobs", start.prompt_logprobs is not None),
        ("structured_outputs", start.constraint is not None),
    ):
        if wanted:
            return Failure(f"{name} is not possible with a command worker; remove it", False, name)
    for name, value in given.items():
        usual = name in defaults and isclose(value, defaults[name], rel_tol=1e-6)
        if name not in ready.honours and not usual:
            known = ", ".join(sorted(ready.honours)) or "none"
            shown = "set" if name == "logit_bias" else f"{value:g}"
            return Failure(
                f"{name} is {shown}, and the program honours only {known}; remove it", False, name
            )
    return None
