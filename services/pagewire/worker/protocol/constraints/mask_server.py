"""The processes that compile grammars and compute masks.

    python -m pagewire.worker.protocol.constraints.mask_server OPTIONS

A worker starts one such process; `MaskProcesses` is the other end. This process reads the model's
tokenizer, forks the processes that do the work, and writes `ready` to standard output. The forks
share the tokenizer's memory. Each serves some of the worker's slots and has its own interpreter, so
masks take no time from the worker's threads. All end when the worker ends or closes its pipes.
"""

import gc
import json
import logging
import os
import select
import signal
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from pagewire.lifecycle import logs
from pagewire.lifecycle.logs import LogFormat
from pagewire.packing import unpack
from pagewire.worker.protocol.constraints.constraint import Constraint
from pagewire.worker.protocol.constraints.grammars import GrammarError, Grammars, grammars_of
from pagewire.worker.protocol.constraints.mask_memory import (
    FENCE,
    MAX_FORCED,
    MaskMemory,
    last_stamp,
    stamp,
)
from pagewire.worker.protocol.constraints.masked_sequence import MaskedSequence
from pagewire.worker.protocol.constraints.prepared_sequence import MaskBuffer, PreparedSequence

# The switch interval of threads, in seconds. Masks must not wait while another thread begins
# a sequence.
SWITCH_SECONDS = 1e-4

# Grammars that a process compiles at the same time, so that a slow one delays few others.
COMPILERS = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The worker's settings for the process that it starts, as JSON in its argument."""

    model: str
    tokenizer: str | None
    vocab_size: int
    slots: int
    words: int
    memory: int  # a file descriptor, like the next two fields
    tokens: int  # raised when there are tokens
    processes: list[tuple[int, int, int]]  # the pipe and the events of each, see `MaskServer`
    log_level: str
    log_format: LogFormat


class Start(NamedTuple):
    """A constrained sequence that takes a slot. A tuple is pickled faster than a dataclass."""

    slot: int
    generation: int
    constraint: Constraint
    prompt: bytes  # int32 [tokens], the last ones, for `begin_after`
    output: bytes  # int32 [generated]
    drafts: bool  # whether its forced tokens are needed


@dataclass(slots=True)
class _Held:
    """The latest sequence of a slot; `sequence` is None until it has begun."""

    generation: int
    drafts: bool
    sequence: PreparedSequence | None = None


class MaskServer:
    """The sequences of some slots."""

    def __init__(
        self,
        grammars: Grammars,
        memory: MaskMemory,
        part: tuple[int, int],
        starts: int,
        masks_known: int,
        forced_known: int,
    ) -> None:
        """`part` is the number of this process, and of all: its slots have that remainder.

        `starts` is a pipe to read from. The others are eventfds to raise when results are written.
        """
        self._grammars, self._memory = grammars, memory
        self._masks = list(map(MaskBuffer, memory.masks))
        self._part = part
        self._starts = Connection(starts, writable=False)
        self._masks_known, self._forced_known = masks_known, forced_known
        self._lock = Lock()  # of all below
        self._held: dict[int, _Held] = {}
        # By slot, the latest generation that was given up. Its start may still be on the pipe.
        self._dropped: dict[int, int] = {}
        # For what takes longer than a mask.
        self._compilers = ThreadPoolExecutor(COMPILERS, "grammars")
        self._resuming = ThreadPoolExecutor(1, "resumed sequences")

    def serve(self, tokens: int) -> None:
        """Works until the worker closes the pipe. `tokens` is raised when there are tokens.

        One thread takes tokens and begins sequences, tokens first: two would compete for the
        interpreter.
        """
        memory, (number, count) = self._memory, self._part
        raised = select.epoll()
        # Edge-triggered, so that one write wakes all processes; they never read the eventfd.
        raised.register(tokens, select.EPOLLIN | select.EPOLLET)
        raised.register(self._starts, select.EPOLLIN)
        starts: deque[Start] = deque()
        going: list[tuple[int, _Held, PreparedSequence]] = []
        read = 0
        while True:
            written = int(memory.written[0])
            busy = bool(read < written or starts or going)
            for fd, _ in raised.poll(0 if busy else None):
                if fd == self._starts.fileno():
                    starts.extend(self._receive())
            if read < written:
                rows = memory.get_tokens(read, written)
                mine = rows[rows[:, 0] % count == number].tolist()
                memory.read[number] = read = written
                if mine:
                    going = self.advance(mine)
            elif starts:
                self._begin_soon(starts.popleft())
            elif going:  # while the device computes
                self._prepare(*going.pop())

    def _receive(self) -> list[Start]:
        """The next sequences on the pipe."""
        try:
            starts: list[Start] = self._starts.recv()
        except EOFError:
            os._exit(0)  # the worker has ended, or needs no more masks
        return starts

    def _begin_soon(self, start: Start) -> None:
        """Begins a sequence, here if that takes about as long as a mask."""
        grammar = start.constraint.grammar
        known = not grammar or self._grammars.is_compiled(grammar)
        if known and not start.output:
            self.begin(start)
        elif (held := self._hold(start)) is not None:
            threads = self._resuming if known else self._compilers
            threads.submit(partial(_or_end, partial(self._begin, start, held)))

    def begin(self, start: Start) -> None:
        """Compiles the grammar of a sequence and computes its first mask."""
        if (held := self._hold(start)) is not None:
            self._begin(start, held)

    def _hold(self, start: Start) -> _Held | None:
        """Assigns a slot to a sequence; None if the sequence was given up before."""
        held = _Held(start.generation, start.drafts)
        with self._lock:
            if start.generation <= self._dropped.get(start.slot, -1):
                return None
            if (before := self._held.get(start.slot)) is not None:
                self._end(start.slot, before.generation)
            self._held[start.slot] = held
        return held

    def _begin(self, start: Start, held: _Held) -> None:
        slot, mask = start.slot, MaskBuffer(np.full(self._memory.words, -1, np.int32))
        failure, sequence, forced = None, None, []
        try:
            sequence = PreparedSequence(
                MaskedSequence(
                    start.constraint, self._grammars, unpack(start.prompt), unpack(start.output)
                )
            )
            forced = self._forced(held, sequence)
            if not sequence.ended:
                sequence.mask(mask)
        except BaseException as error:  # a panic in Rust is not an Exception
            failure = error
        with self._lock:
            if self._held.get(slot) is not held:
                return
            if failure is not None:
                self._fail(slot, held, failure)
            else:
                assert sequence is not None
                if held.drafts:
                    self._note_forced(slot, held, sequence, forced)
                if sequence.ended:
                    self._end(slot, held.generation)
                else:
                    held.sequence = sequence
                    self._memory.masks[slot] = mask.words
                    self._publish(slot, held, sequence)
        self._raise(held.drafts)

    def advance(self, rows: list[list[int]]) -> list[tuple[int, _Held, PreparedSequence]]:
        """Takes tokens of slots, and computes the masks of the next tokens.

        A row is a slot, the generation of its sequence and the token; -1 gives up the sequence.
        Returns the sequences that continue.
        """
        going: list[tuple[int, _Held, PreparedSequence]] = []
        drafts = False
        with self._lock:
            for slot, generation, token in rows:
                held = self._held.get(slot)
                if token < 0:
                    if last_stamp(generation) > self._memory.ready[slot]:
                        self._dropped[slot] = generation
                        self._end(slot, generation)
                    continue
                if held is None or held.generation != generation:
                    continue
                sequence = held.sequence
                if sequence is None:
                    continue
                try:
                    sequence.advance(token)
                    if held.drafts:
                        drafts = True
                        self._note_forced(slot, held, sequence, self._forced(held, sequence))
                except BaseException as error:
                    self._fail(slot, held, error)
                else:
                    if sequence.ended:
                        self._end(slot, held.generation)
                    else:
                        going.append((slot, held, sequence))
            if drafts:
                os.eventfd_write(self._forced_known, 1)
            for slot, held, sequence in going:
                try:
                    # The device no longer needs the old mask: it has drawn that token.
                    sequence.mask(self._masks[slot])
                except BaseException as error:
                    self._fail(slot, held, error)
                else:
                    self._publish(slot, held, sequence)
        os.eventfd_write(self._masks_known, 1)
        return going

    def _prepare(self, slot: int, held: _Held, sequence: PreparedSequence) -> None:
        """Does work of a sequence before its next token arrives."""
        with self._lock:
            if self._held.get(slot) is held and not held.drafts:
                sequence.prepare(self._masks[slot].words)

    def _forced(self, held: _Held, sequence: PreparedSequence) -> list[int]:
        return sequence.forced_tokens()[:MAX_FORCED] if held.drafts else []

    def _note_forced(
        self, slot: int, held: _Held, sequence: PreparedSequence, forced: list[int]
    ) -> None:
        self._memory.forced[slot, : len(forced)] = forced
        self._memory.forced_counts[slot] = len(forced)
        with FENCE:
            self._memory.taken[slot] = stamp(held.generation, sequence.index)

    def _publish(self, slot: int, held: _Held, sequence: PreparedSequence) -> None:
        """Stores the stamp: the mask of the slot is now that of the next token."""
        with FENCE:
            self._memory.ready[slot] = stamp(held.generation, sequence.index)

    def _fail(self, slot: int, held: _Held, error: BaseException) -> None:
        """Ends only this sequence, for any error."""
        if not isinstance(error, GrammarError):
            log.error("a mask could not be computed", exc_info=error)
            error = GrammarError(f"its grammar could not be followed ({error}); simplify it")
        self._memory.note_failure(slot, held.generation, str(error), error.field)
        self._end(slot, held.generation)

    def _end(self, slot: int, generation: int) -> None:
        """Allows later steps any token: their tokens are not used."""
        self._held.pop(slot, None)
        self._memory.masks[slot] = -1
        with FENCE:
            self._memory.taken[slot] = self._memory.ready[slot] = last_stamp(generation)

    def _raise(self, drafts: bool) -> None:
        if drafts:
            os.eventfd_write(self._forced_known, 1)
        os.eventfd_write(self._masks_known, 1)


def _or_end(call: Callable[[], None]) -> None:
    """Runs a call of a thread; an unexpected error ends the process."""
    try:
        call()
    except BaseException:
        log.critical("a thread of a mask process failed", exc_info=True)
        os._exit(1)


def main() -> int:
    options = ServerOptions(**json.loads(sys.argv[1]))
    # The worker ends these processes, even if a signal goes to its whole process group.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    logs.configure("worker", options.log_level, options.log_format)
    tokenizer = None if options.tokenizer is None else Path(options.tokenizer)
    grammars = grammars_of(Path(options.model), options.vocab_size, tokenizer)
    if grammars is None:
        return 1
    memory = MaskMemory(options.slots, options.words, options.memory)
    gc.collect()
    gc.freeze()  # collections would copy pages that the processes share
    children = set()
    for number, pipe_and_events in enumerate(options.processes):
        pid = os.fork()
        if pid == 0:
            sys.setswitchinterval(SWITCH_SECONDS)
            part = number, len(options.processes)
            server = MaskServer(grammars, memory, part, *pipe_and_events)
            _or_end(partial(server.serve, options.tokens))
        children.add(pid)
    print("ready", flush=True)
    status = 0
    while children and not status:
        pid, ended = os.wait()
        children.discard(pid)
        status = os.waitstatus_to_exitcode(ended)
    return abs(status)


if __name__ == "__main__":
    sys.exit(main())
