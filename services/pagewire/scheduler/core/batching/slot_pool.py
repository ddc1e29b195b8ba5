"""The slots of one worker: which are free, and which wait until their last steps are answered."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetiredSlot:
    """A slot whose sequence has left, and the blocks that the sequence held."""

    slot: int
    last_step: int
    blocks: list[int]


class SlotPool:
    """Hands out slots and takes them back.

    Invariant: a slot and the blocks of its sequence are reused only after every step that names
    the slot has been answered. Until then both are retired.
    """

    __slots__ = ("_free", "retired")

    def __init__(self, num_slots: int) -> None:
        self.retired: list[RetiredSlot] = []
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def num_retired_blocks(self) -> int:
        """Blocks that are released once the steps in flight are answered."""
        return sum(len(retired.blocks) for retired in self.retired)

    def take(self) -> int:
        """Takes a free slot; there must be one."""
        return self._free.pop()

    def retire(self, slot: int, last_step: int, blocks: list[int]) -> None:
        """Takes a slot back; `last_step` is the last step that names it."""
        self.retired.append(RetiredSlot(slot, last_step, blocks))

    def release(self, answered: int) -> list[list[int]]:
        """Frees the slots that no step after `answered` names; returns the blocks of each."""
        if not self.retired:
            return []
        done = [retired for retired in self.retired if retired.last_step <= answered]
        self.retired = [retired for retired in self.retired if retired.last_step > answered]
        self._free += [retired.slot for retired in done]
        return [retired.blocks for retired in done]
