"""The slots that decode one token in every step, and the groups of them that share blocks."""

from pagewire.scheduler.core.batching.slot_table import SlotTable
from pagewire.scheduler.core.batching.step_plan import NO_SLOTS, StepPlan
from pagewire.scheduler.core.batching.variable_advance import VariableAdvance
from pagewire.scheduler.core.kv.prefix_groups import PrefixGroups


class DecodeList:
    """The list and its groups, which are sent to the worker only when they have changed.

    `SlotTable.decoding` marks the slots; the list is rebuilt from there after a change.
    """

    __slots__ = (
        "_changed",
        "_groups",
        "_groups_unsent",
        "_last_planned",
        "_table",
        "_unsent",
        "_variable",
        "slots",
    )

    def __init__(
        self, table: SlotTable, prefix_groups: bool, variable: VariableAdvance | None = None
    ) -> None:
        """`prefix_groups`: whether the worker uses groups. `variable` None: rows get one token
        each."""
        # As of the latest `refresh`, ascending.
        self.slots = NO_SLOTS
        self._table = table
        self._variable = variable
        # Whether `slots` must be rebuilt, and whether the worker has another list.
        self._changed = False
        self._unsent = False
        # The last step planned, which is the last step of a slot that leaves the list.
        self._last_planned = 0
        self._groups = PrefixGroups() if prefix_groups else None
        self._groups_unsent = False

    def set(self, slot: int, decoding: bool) -> None:
        """Adds a slot to the list, or removes it, from the next `refresh` on."""
        if self._table.decoding[slot] != decoding:
            self._table.decoding[slot] = decoding
            self._changed = True
            if not decoding:
                self._table.last_step[slot] = self._last_planned

    def discard(self, slot: int) -> None:
        """Removes a slot whose sequence leaves."""
        self.set(slot, False)
        if self._groups is not None:
            self._groups.discard(slot)

    def refresh(self) -> None:
        """Rebuilds the list if a slot was added or removed."""
        if self._changed:
            self.slots = self._table.decoding.nonzero()[0]
            self._changed = False
            self._unsent = True
            self._regroup()

    def put_into(self, plan: StepPlan) -> None:
        """Adds the decode rows to a plan, and marks what the worker does not have yet."""
        plan.decode_slots = plan.rows = self.slots
        plan.decode_changed = self._unsent
        if self._groups is not None:
            self._groups_unsent |= self._groups.refresh()
            plan.groups, plan.groups_changed = self._groups.groups, self._groups_unsent

    def advance(self, plan: StepPlan) -> None:
        """Counts the token that the step decodes for each slot; slots at their limit leave."""
        table = self._table
        self._last_planned = plan.number
        if not len(self.slots):
            return
        if self._variable is None:
            table.computed += table.decoding
            table.sampled += table.decoding
        else:
            self._variable.advance()
            plan.ends = True  # any row may be the last one
        last = ((table.sampled >= table.limit) & table.decoding).nonzero()[0]
        if len(last):
            table.decoding[last] = False
            table.last_step[last] = plan.number
            self._changed = plan.ends = True

    def settle(self, plan: StepPlan) -> None:
        """Counts the tokens that the rows of an answered step got; slots at their limit leave."""
        if self._variable is not None:
            for slot in self._variable.settle(plan.decode_slots).tolist():
                self.set(slot, False)

    def sent(self) -> None:
        """Notes that the plan is sent, so the worker will have the list and the groups."""
        self._unsent = self._groups_unsent = False

    def _regroup(self) -> None:
        """Adds the slots that have entered the list to the groups, and removes those that left."""
        groups = self._groups
        if groups is None:
            return
        decode = self.slots.tolist()
        for slot in groups.slots() - {*decode}:
            groups.discard(slot)
        for slot in decode:
            if slot not in groups:
                groups.add(slot, self._table.sequence(slot).blocks)
