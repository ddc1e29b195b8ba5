"""The part of a sequence that need not be computed, because its KV is cached."""

from dataclasses import dataclass
from enum import Enum

from pagewire.scheduler.core.kv.partial_blocks import PartialPrefix


class Restart(Enum):
    """Where most of a preempted sequence's KV comes from when it starts again."""

    KEPT = "kept"  # from the device, where it still was
    SWAPPED = "swapped"  # from host memory
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Cached KV of a sequence's first tokens, in this order.

    `blocks` are full blocks to share, `host_blocks` full blocks to load from host memory, and
    `partial` is a block of which the first tokens are to be copied. The first `num_freed` of
    `blocks` are 0: they are behind the model's window.
    """

    block_size: int
    blocks: list[int]
    host_blocks: list[int]
    partial: PartialPrefix | None
    num_freed: int = 0

    @property
    def held(self) -> list[int]:
        """The blocks to share, without those behind the window."""
        return self.blocks[self.num_freed :] if self.num_freed else self.blocks

    @property
    def num_full(self) -> int:
        """Full blocks, shared, loaded and behind the window."""
        return len(self.blocks) + len(self.host_blocks)

    @property
    def num_loaded(self) -> int:
        """Tokens that are loaded from host memory."""
        return len(self.host_blocks) * self.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.num_full * self.block_size + (self.partial.tokens if self.partial else 0)

    def restart(self, num_known: int) -> Restart:
        """How a preempted sequence of `num_known` tokens starts again with this prefix."""
        loaded = self.num_loaded
        kept = self.num_tokens - loaded
        computed = num_known - kept - loaded
        if loaded >= max(kept, computed):
            return Restart.SWAPPED
        return Restart.KEPT if kept >= computed else Restart.RECOMPUTED
