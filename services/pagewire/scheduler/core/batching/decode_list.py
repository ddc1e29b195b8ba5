"""The slots that decode one token in every step, and which of them share blocks."""

from pagewire.scheduler.core.batching.slot_table import SlotTable
from pagewire.scheduler.core.batching.step_plan import NO_SLOTS, StepPlan
from pagewire.scheduler.core.kv.prefix_groups import PrefixGroups


class DecodeList:
    """A list that travels only when it has changed, and so do the groups among its slots.

    Which slots decode stands in the table; the list is rebuilt from there when one has entered or
    left.
    """

    __slots__ = ("_dirty", "_groups", "_groups_unsent", "_latest", "_table", "_unsent", "slots")

    def __init__(self, table: SlotTable, prefix_groups: bool) -> None:
        """`prefix_groups`: whether the worker wants to know which slots share blocks."""
        # As of the latest `refresh`, ascending.
        self.slots = NO_SLOTS
        self._table = table
        # Dirty: a slot entered or left the list; unsent: the worker does not know the list yet.
        self._dirty = False
        self._unsent = False
        # The last step planned, and so the last one of a slot that leaves the list.
        self._latest = 0
        self._groups = PrefixGroups() if prefix_groups else None
        self._groups_unsent = False

    def set(self, slot: int, decoding: bool) -> None:
        """A slot decodes from the next refresh on, or does not."""
        if self._table.decoding[slot] != decoding:
            self._table.decoding[slot] = decoding
            self._dirty = True
            if not decoding:
                self._table.last_step[slot] = self._latest

    def discard(self, slot: int) -> None:
        """The slot's sequence leaves."""
        self.set(slot, False)
        if self._groups is not None:
            self._groups.discard(slot)

    def refresh(self) -> None:
        """Rebuilds the list if a slot has entered or left it."""
        if self._dirty:
            self.slots = self._table.decoding.nonzero()[0]
            self._dirty = False
            self._unsent = True
            self._regroup()

    def put_into(self, plan: StepPlan) -> None:
        """The plan's decode rows, and what of them the worker does not know yet."""
        plan.decode_slots = plan.rows = self.slots
        plan.decode_changed = self._unsent
        if self._groups is not None:
            self._groups_unsent |= self._groups.refresh()
            plan.groups, plan.groups_changed = self._groups.groups, self._groups_unsent

    def advance(self, plan: StepPlan) -> None:
        """The step decodes a token of each; those that reach their limit leave the list."""
        table = self._table
        self._latest = plan.number
        if not len(self.slots):
            return
        table.computed += table.decoding
        table.sampled += table.decoding
        last = ((table.sampled >= table.limit) & table.decoding).nonzero()[0]
        if len(last):
            table.decoding[last] = False
            table.last_step[last] = plan.number
            self._dirty = plan.ends = True

    def sent(self) -> None:
        """The worker will know the list and the groups."""
        self._unsent = self._groups_unsent = False

    def _regroup(self) -> None:
        """Tells the groups which slots have left or entered the list."""
        groups = self._groups
        if groups is None:
            return
        decode = self.slots.tolist()
        for slot in groups.slots() - {*decode}:
            groups.discard(slot)
        for slot in decode:
            if slot not in groups:
                groups.add(slot, self._table.sequence(slot).blocks)
