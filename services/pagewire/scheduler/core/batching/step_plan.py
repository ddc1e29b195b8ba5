"""A step as the scheduler plans it, and the new tokens of its answer."""

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
    """One step: the changes that the worker needs, and the rows of its answer.

    `rows` are the slots that sample, in the order of the answer: `decode_slots`, then `completed`.
    """

    number: int
    # The worker makes these copies before all else.
    copies: HostCopies | None = None
    starts: list[Sequence] = field(default_factory=list)
    append_slots: list[int] = field(default_factory=list)
    append_blocks: list[int] = field(default_factory=list)
    # Slots that have given up their first blocks, and how many, those given up before included.
    freed_slots: list[int] = field(default_factory=list)
    freed_counts: list[int] = field(default_factory=list)
    prefill_slots: list[int] = field(default_factory=list)
    prefill_counts: list[int] = field(default_factory=list)
    decode_slots: SlotArray = field(default_factory=lambda: NO_SLOTS)
    decode_changed: bool = False
    # Groups of decode slots that share leading blocks, to be sent if `groups_changed`.
    groups: list[PrefixGroup] = field(default_factory=list)
    groups_changed: bool = False
    rows: SlotArray = field(default_factory=lambda: NO_SLOTS)
    # Slots whose last known token is computed in this step, in the order of `prefill_slots`.
    completed: list[int] = field(default_factory=list)
    # Whether a sequence reaches its limit of tokens.
    ends: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, decoded and prefilled."""
        return len(self.decode_slots) + sum(self.prefill_counts)


@dataclass(slots=True)
class StepOutcome:
    """New tokens of live sequences.

    `slots`, `tokens` and `indices` (positions in the outputs) are parallel arrays [n]. `stopped`
    are the rows, ascending, whose tokens are stop ids; `ended` are those whose outputs have reached
    their limit. The caller finishes the sequences of both. `valid` marks the rows of the answer
    that are included here; None for all.
    """

    slots: SlotArray
    tokens: Int32Array
    indices: Int32Array
    stopped: list[int]
    ended: list[int]
    valid: NDArray[np.bool_] | None

    def only(self, rows: NDArray[np.bool_]) -> "StepOutcome":
        """The outcome of the rows that are marked."""
        places = (np.cumsum(rows) - 1).tolist()
        return StepOutcome(
            self.slots[rows],
            self.tokens[rows],
            self.indices[rows],
            [places[row] for row in self.stopped if rows[row]],
            [places[row] for row in self.ended if rows[row]],
            self.valid,
        )
