"""Blocks for the tokens that sequences decode, and preemption when no block is left."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagewire.scheduler.core.batching.decode_list import DecodeList
from pagewire.scheduler.core.batching.prefix_sharing import PrefixSharing
from pagewire.scheduler.core.batching.slot_pool import SlotPool
from pagewire.scheduler.core.batching.slot_table import SlotArray, SlotTable
from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.batching.variable_advance import VariableAdvance
from pagewire.scheduler.core.batching.window import SlidingWindow
from pagewire.scheduler.core.kv.block_pool import BlockPool
from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence


class BlockGrowth:
    """Appends a block to every decoding slot whose blocks are full."""

    __slots__ = (
        "_decode",
        "_policy",
        "_pool",
        "_sharing",
        "_slot_pool",
        "_table",
        "_variable",
        "_window",
        "stalled",
    )

    def __init__(
        self,
        table: SlotTable,
        slot_pool: SlotPool,
        pool: BlockPool,
        decode: DecodeList,
        sharing: PrefixSharing,
        policy: SchedulingPolicy,
        window: SlidingWindow | None = None,
        variable: VariableAdvance | None = None,
    ) -> None:
        """`variable` None: decode rows get one token each."""
        # Slots that would decode but wait for a block.
        self.stalled: set[int] = set()
        self._table = table
        self._slot_pool = slot_pool
        self._pool = pool
        self._decode = decode
        self._sharing = sharing
        self._policy = policy
        self._window = window
        self._variable = variable

    def grow(self, plan: StepPlan, preempt: Callable[[Sequence], None]) -> None:
        """Appends a block to each slot that needs one, and brings the decode list up to date.

        When blocks run out, `preempt` is called with victims, and slots may stall.
        """
        table = self._table
        self._decode.refresh()
        # All slots at once: whole arrays cost less than gathering the rows of the decode list.
        if self._variable is None:
            full = ((table.computed >= table.capacity) & table.decoding).nonzero()[0]
        else:
            full = self._variable.lacking().nonzero()[0]
        if not self.stalled and len(full) <= self._pool.available:
            self._append_to_all(full, plan)
        else:
            self._append_in_order({*full.tolist(), *self.stalled}, plan, preempt)
            self._decode.refresh()

    def _append_to_all(self, slots: SlotArray, plan: StepPlan) -> None:
        """Appends a block to each slot; the pool has enough."""
        if not len(slots):
            return
        named, blocks = slots.tolist(), self._pool.allocate(len(slots))
        sequence = self._table.sequence
        for slot, block in zip(named, blocks, strict=True):
            sequence(slot).blocks.append(block)
        self._table.capacity[slots] += self._pool.block_size
        plan.append_slots += named
        plan.append_blocks += blocks

    def _append_in_order(
        self, slots: set[int], plan: StepPlan, preempt: Callable[[Sequence], None]
    ) -> None:
        """Appends a block to each slot, in the order of the policy, while memory is short.

        In that order a victim always comes after the slot that it is preempted for. So a block that
        this plan has appended is never taken away again.
        """
        awaited = self._awaited_blocks()
        for slot in sorted(slots, key=lambda s: self._policy.key(self._table.sequence(s))):
            if self._table.live[slot]:
                awaited = self._append_or_stall(slot, awaited, plan, preempt)

    def _append_or_stall(
        self, slot: int, awaited: int, plan: StepPlan, preempt: Callable[[Sequence], None]
    ) -> int:
        """Appends a block to a slot, or removes the slot from this step.

        If no block is free and at most as many are `awaited` as slots stall, a victim is preempted.
        Steps in flight may still name the victim's blocks; the slot stalls until these steps are
        answered. Returns how many blocks are awaited now.
        """
        table, pool = self._table, self._pool
        self.stalled.discard(slot)
        if pool.available == 0:
            self._sharing.forget_all()
        while pool.available == 0 and awaited <= len(self.stalled):
            preempt(self._policy.victim(self._preemptible()))
            awaited = self._awaited_blocks()
            if not table.live[slot]:
                return awaited
        if pool.available == 0:
            self.stalled.add(slot)
            self._decode.set(slot, False)
            return awaited
        self._decode.set(slot, True)
        self._append_to_all(np.array([slot], dtype=np.intp), plan)
        return awaited

    def _awaited_blocks(self) -> int:
        """Blocks that are released once the steps in flight are answered."""
        ending = self._ending()
        held = sum(len(self._table.sequence(s).held) for s in np.flatnonzero(ending).tolist())
        if self._window is not None:
            held += int(self._window.awaited()[self._table.live & ~ending].sum())
        return self._slot_pool.num_retired_blocks + held

    def _preemptible(self) -> list[Sequence]:
        slots = np.flatnonzero(self._table.live & ~self._ending()).tolist()
        return [self._table.sequence(slot) for slot in slots]

    def _ending(self) -> NDArray[np.bool_]:
        """Slots whose last token is in flight: they release their blocks without a preemption."""
        return self._table.live & (self._table.sampled >= self._table.limit)
