"""The prefix groups that apply: those that a scheduler sent, among the slots that decode."""

import logging

import numpy as np

from pagewire.packing import Int32Array
from pagewire.worker.protocol.steps.step import StepPrefixGroup

log = logging.getLogger(__name__)


class PrefixGroups:
    """Holds the groups that were sent last, and the groups that apply to the decode slots."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._sent: tuple[StepPrefixGroup, ...] = ()
        self._decodes = np.empty(0, np.int32)  # the decode slots that `_applied` is valid for
        self._applied: tuple[StepPrefixGroup, ...] = ()

    def apply(
        self,
        sent: tuple[StepPrefixGroup, ...] | None,
        decodes: Int32Array,
        tables: Int32Array,
        num_blocks: Int32Array,
    ) -> tuple[StepPrefixGroup, ...]:
        """The groups among the decode slots; the same object as before if nothing has changed.

        A group whose members do not share the blocks is left out, because it would change their
        results. A member that does not decode is left out too.

        Args:
            sent: the groups of this step, None for those of the step before.
            decodes: `[decodes]`, the slots that decode.
            tables: `[slots, max_blocks]`, the block tables.
            num_blocks: `[slots]`, the number of blocks in each.
        """
        if sent is not None:
            self._sent = sent
        elif not self._sent or np.array_equal(decodes, self._decodes):
            return self._applied
        decoding = np.zeros(self._num_slots, np.bool_)
        decoding[decodes] = True
        applied = []
        for group in self._sent:
            slots = group.slots[decoding[group.slots]]
            if len(slots) < 2:
                continue
            shared = tables[slots, : group.blocks]
            if group.blocks > num_blocks[slots].min() or (shared != shared[0]).any():
                log.error("prefix group %s does not share %d blocks", slots, group.blocks)
                continue
            applied.append(StepPrefixGroup(group.blocks, slots))
        self._decodes, self._applied = decodes, tuple(applied)
        return self._applied
