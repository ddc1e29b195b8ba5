"""A step as the scheduler plans it, and what its answer means."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array
from pagewire.scheduler.core.batching.slot_table import SlotArray
from pagewire.scheduler.core.kv.host_tier import HostCopies
from pagewire.scheduler.core.kv.prefix_groups import PrefixGroup
from pagewire.scheduler.core.sequence import Sequence

NO_SLOTS: SlotArray = np.zeros(0, dtype=np.intp)


@dataclass(slots=True)
class StepPlan:
    """One step: deltas for the worker, and the rows that its answer will have.

    `rows` are the slots that sample, in the order of the answer: `decode_slots`, then the
    prefill chunks that reach the last known token.
    """

    number: int
    # Copied before anything else happens.
    copies: HostCopies | None = None
    starts: list[Sequence] = field(default_factory=list)
    append_slots: list[int] = field(default_factory=list)
    append_blocks: list[int] = field(default_factory=list)
    prefill_slots: list[int] = field(default_factory=list)
    prefill_counts: list[int] = field(default_factory=list)
    decode_slots: SlotArray = field(default_factory=lambda: NO_SLOTS)
    decode_changed: bool = False
    # Which decode slots share leading blocks; the worker knows unless `groups_changed`.
    groups: list[PrefixGroup] = field(default_factory=list)
    groups_changed: bool = False
    rows: SlotArray = field(default_factory=lambda: NO_SLOTS)
    # SlotArray whose last known token is computed in this step.
    completed: list[int] = field(default_factory=list)
    # Whether a sequence gets the last token that it may have.
    ends: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decode_slots) + sum(self.prefill_counts)


@dataclass(slots=True)
class StepOutcome:
    """New tokens of live sequences: parallel arrays [n], and rows of them, ascending.

    `indices` are positions in the outputs. `stopped` are the rows of tokens that are stop ids,
    `ended` those of tokens that are the last by length. The caller finishes the sequences of both.
    `valid` marks the rows of the answer that are such tokens, None for all of them.
    """

    slots: SlotArray
    tokens: Int32Array
    indices: Int32Array
    stopped: list[int]
    ended: list[int]
    valid: NDArray[np.bool_] | None

    def only(self, rows: NDArray[np.bool_]) -> "StepOutcome":
        """Those of the rows that are marked."""
        places = (np.cumsum(rows) - 1).tolist()
        return StepOutcome(
            self.slots[rows],
            self.tokens[rows],
            self.indices[rows],
            [places[row] for row in self.stopped if rows[row]],
            [places[row] for row in self.ended if rows[row]],
            self.valid,
        )
