"""Blocks behind the window of a model: running sequences give them up, and prefills get new ones.

Only for models in which every layer has a window. A block is given up when the steps that see it
are answered, so no step in flight reads or writes it, and the next step may give it to another
sequence. It stays cached if it is full and was cached.
"""

from collections.abc import Iterable

import numpy as np

from pagewire.limits import INT32_MAX
from pagewire.packing import Int32Array
from pagewire.scheduler.core.batching.prefix_sharing import PrefixSharing
from pagewire.scheduler.core.batching.slot_table import SlotArray, SlotTable
from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.kv.block_pool import SCRATCH_BLOCK, BlockPool


class SlidingWindow:
    """The blocks that the sequences of one worker hold around their windows, by slot.

    A sequence keeps the blocks that the first token of its current block sees. So its last full
    block stays the end of a prefix that another sequence can continue.
    """

    __slots__ = (
        "_answered",
        "_before_output",
        "_due",
        "_limits",
        "_pool",
        "_reach",
        "_sharing",
        "_table",
        "_unsent",
    )

    def __init__(
        self,
        reach: int,
        limits: WorkerLimits,
        table: SlotTable,
        pool: BlockPool,
        sharing: PrefixSharing,
    ) -> None:
        """`reach`: blocks before its own that a token sees."""

        def column() -> Int32Array:
            return np.zeros(limits.num_slots, dtype=np.int32)

        self._reach = reach
        self._limits = limits
        self._table = table
        self._pool = pool
        self._sharing = sharing
        # Tokens whose KV answered steps computed; at `_due` of them the next block is given up.
        self._answered = column()
        self._due = column()
        # Tokens before the output, less the last one of all, whose KV is not computed.
        self._before_output = column()
        # By slot: the number of blocks given up, if the worker does not have it yet.
        self._unsent: dict[int, int] = {}

    def occupy(self, slot: int) -> None:
        """Starts to track a sequence that has just taken its slot."""
        sequence = self._table.sequence(slot)
        self._answered[slot] = sequence.num_computed
        self._before_output[slot] = sequence.num_known - sequence.num_generated - 1
        self._set_due(slot, sequence.num_freed)

    def vacate(self, slot: int) -> None:
        """Stops tracking a sequence that leaves its slot."""
        self._unsent.pop(slot, None)

    def stop(self, slot: int) -> None:
        """Gives up no more blocks of a slot: its sequence has failed, and leaves."""
        self._due[slot] = INT32_MAX

    def answered(self, plan: StepPlan, rows: SlotArray) -> None:
        """Gives up blocks after the answer to a step; `rows` are the live slots that got a token.

        Call it once those tokens are in the slot table.
        """
        for slot, count in zip(plan.prefill_slots, plan.prefill_counts, strict=True):
            self._answered[slot] += count
        self._answered[rows] = self._before_output[rows] + self._table.received[rows]
        computed = np.concatenate([rows, np.array(plan.prefill_slots, dtype=np.intp)])
        due = computed[self._answered[computed] >= self._due[computed]].tolist()
        if not due:
            return
        given_up: dict[int, None] = {}
        for slot in dict.fromkeys(due):
            if self._table.live[slot]:
                blocks = self._give_up(slot)
                if not given_up.keys().isdisjoint(blocks):  # a release names each block once
                    self._release([*given_up])
                    given_up = {}
                given_up.update(dict.fromkeys(blocks))
        self._release([*given_up])

    def awaited(self) -> Int32Array:
        """By slot [num_slots], the blocks that it gives up once the steps in flight are answered.

        Slots without a live sequence have any number.
        """
        size = self._limits.block_size
        more: Int32Array = (self._table.computed - self._due) // size + 1
        return np.maximum(more, 0, out=more)

    def extend(self, plan: StepPlan, slot: int, count: int) -> int:
        """Allocates blocks for a prefill's chunk of `count` tokens; returns how many have room.

        Allocates no more blocks than the prefill may hold, and than are free.
        """
        table, pool = self._table, self._pool
        sequence, computed = table.sequence(slot), int(table.computed[slot])
        wanted = self._wanted(slot, computed + count)
        if wanted > 0:
            if wanted > pool.available:
                self._sharing.forget_all()
            blocks = pool.allocate(min(wanted, pool.available))
            sequence.blocks += blocks
            table.capacity[slot] += len(blocks) * self._limits.block_size
            plan.append_slots += [slot] * len(blocks)
            plan.append_blocks += blocks
        return min(count, int(table.capacity[slot]) - computed)

    def wanted(self, slots: Iterable[int]) -> int:
        """Blocks that the prefills of `slots` may hold and do not have yet."""
        return sum(self._wanted(slot, self._table.sequence(slot).num_known) for slot in slots)

    def put_into(self, plan: StepPlan) -> None:
        """Adds to a step that is sent the changes that the worker does not have yet."""
        if self._unsent:
            plan.freed_slots, plan.freed_counts = [*self._unsent], [*self._unsent.values()]
            self._unsent = {}

    def _wanted(self, slot: int, tokens: int) -> int:
        """Blocks that a prefill may hold for its first `tokens` and does not have yet."""
        sequence = self._table.sequence(slot)
        held = len(sequence.blocks) - sequence.num_freed
        most = self._limits.most_blocks(sequence.num_known)
        return max(0, min(self._limits.blocks_for(tokens) - len(sequence.blocks), most - held))

    def _release(self, blocks: list[int]) -> None:
        self._sharing.forget_copies_of(blocks)
        self._pool.release(blocks)

    def _give_up(self, slot: int) -> list[int]:
        """Takes the blocks behind a slot's window out of its table; returns them."""
        sequence = self._table.sequence(slot)
        begin, end = sequence.num_freed, int(self._answered[slot]) // self._limits.block_size
        end -= self._reach
        blocks = sequence.blocks[begin:end]
        sequence.blocks[begin:end] = [SCRATCH_BLOCK] * len(blocks)
        sequence.num_freed = self._unsent[slot] = end
        self._set_due(slot, end)
        # Its last block is offered for copies behind the block before it.
        if end >= max(1, (sequence.num_known - 1) // self._limits.block_size):
            self._sharing.withdraw(sequence)
        return blocks

    def _set_due(self, slot: int, freed: int) -> None:
        self._due[slot] = (freed + 1 + self._reach) * self._limits.block_size
