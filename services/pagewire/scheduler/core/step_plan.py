"""A step as the scheduler plans it, and what its answer means."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array
from pagewire.scheduler.core.host_tier import HostCopies
from pagewire.scheduler.core.prefix_groups import PrefixGroup
from pagewire.scheduler.core.sequence import Sequence
from pagewire.scheduler.core.slot_table import Slots

NO_SLOTS: Slots = np.zeros(0, dtype=np.intp)


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
    decode_slots: Slots = field(default_factory=lambda: NO_SLOTS)
    decode_changed: bool = False
    # Which decode slots share leading blocks; the worker knows unless `groups_changed`.
    groups: list[PrefixGroup] = field(default_factory=list)
    groups_changed: bool = False
    rows: Slots = field(default_factory=lambda: NO_SLOTS)
    # Slots whose last known token is computed in this step.
    completed: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decode_slots) + sum(self.prefill_counts)


@dataclass(slots=True)
class StepOutcome:
    """New tokens of live sequences; all arrays but `valid` are parallel [n].

    `indices` are positions in the outputs. `stopped` marks tokens that are stop ids, `ended`
    those that are the last by length. The caller finishes the sequences of both. `valid` marks
    the rows of the answer that are such tokens.
    """

    slots: Slots
    tokens: Int32Array
    indices: Int32Array
    stopped: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    valid: NDArray[np.bool_]

    def only(self, rows: NDArray[np.bool_]) -> "StepOutcome":
        """Those of some rows."""
        return StepOutcome(
            self.slots[rows],
            self.tokens[rows],
            self.indices[rows],
            self.stopped[rows],
            self.ended[rows],
            self.valid,
        )
