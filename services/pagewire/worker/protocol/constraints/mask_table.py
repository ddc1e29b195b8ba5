"""The masks of the slots of a worker, in one array that a device copies from."""

from pagewire.worker.protocol.constraints.token_bans import Words


class MaskTable:
    """One mask for each slot, of the next token of the sequence that holds the slot.

    One is enough although steps are sent ahead: the mask of token N+1 is written after token N is
    known, so after the device has used the mask of token N.

    Streams share the table. A sequence may write to its row only while it holds the slot; all
    writes but those that give a sequence up are made by one thread.
    """

    def __init__(self, words: Words) -> None:
        """`words [slots, words]` is the memory."""
        self.words = words
        self.holders: list[object] = [None] * len(words)  # by slot, see `holds`

    def take(self, slot: int, holder: object) -> None:
        """Makes `holder` the one that may write to a slot's row."""
        self.holders[slot] = holder

    def holds(self, slot: int, holder: object) -> bool:
        """Whether a slot still belongs to `holder`."""
        return self.holders[slot] is holder
