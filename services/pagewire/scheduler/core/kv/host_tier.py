"""Blocks in host memory, which keep cached KV after its eviction from the device."""

from dataclasses import dataclass

# Blocks that count as found at the start, so that the first estimate of reuse is high.
_INITIALLY_FOUND = 64.0
# While saving does not pay, one text in this many is saved anyway, to notice when it pays again.
_SAMPLED_TEXTS = 16


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host memory of one worker: its blocks, and the costs of its use in seconds.

    `prefill_token` is the time to compute a prompt token at the beginning of a text,
    `prefill_pair` the time that each token before it adds.
    """

    num_blocks: int = 0
    save_block: float = 0.0
    load_block: float = 0.0
    prefill_token: float = 0.0
    prefill_pair: float = 0.0

    def prefill(self, begin: int, end: int) -> float:
        """Seconds to compute the tokens of a text from `begin` to `end`."""
        pairs = (end * (end - 1) - begin * (begin - 1)) / 2
        return self.prefill_token * (end - begin) + self.prefill_pair * pairs

    def load_pays(self, blocks: int, begin: int, end: int) -> bool:
        """Whether it takes less time to load `blocks` blocks than to compute their tokens.

        They hold the tokens of a text from `begin` to `end`.
        """
        return blocks * self.load_block < self.prefill(begin, end)

    def save_pays(self, blocks: int, tokens: int, reused: float) -> bool:
        """Whether to save a text of this size, if the share `reused` of the saved blocks is loaded
        again."""
        gained = self.prefill(0, tokens) - blocks * self.load_block
        return reused * gained > blocks * self.save_block


NO_HOST_MEMORY = HostMemory()


@dataclass(frozen=True, slots=True)
class HostCopies:
    """The copies between the device and host memory that a step makes first: saves, then loads.

    Blocks in host memory are numbered from 0. `saved` is parallel to `saved_host`, `loaded` to
    `loaded_host`.
    """

    saved: list[int]
    saved_host: list[int]
    loaded_host: list[int]
    loaded: list[int]


class Reuse:
    """The share of saved blocks that are found again before they are dropped; recent ones count
    most."""

    __slots__ = ("_dropped", "_found", "_window")

    def __init__(self, window: int) -> None:
        """Counts are halved when they add up to more than `window` blocks."""
        self._window = window
        self._found, self._dropped = _INITIALLY_FOUND, 0.0

    @property
    def share(self) -> float:
        """The share, from 0 to 1."""
        return self._found / (self._found + self._dropped)

    def count(self, found: int = 0, dropped: int = 0) -> None:
        """Counts blocks that were found again, and blocks that were dropped before that."""
        self._found += found
        self._dropped += dropped
        if self._found + self._dropped > self._window:
            self._found, self._dropped = self._found / 2, self._dropped / 2


class HostTier:
    """Which blocks in host memory are free, and the copies that the next step makes.

    Their numbers begin at `first`, after those of the device. Invariant: each is free, cached or
    leaving. The next step loads a leaving block. A step saves before it loads, so a leaving block
    is not free before that step is planned.
    """

    __slots__ = ("_free", "_loads", "_saves", "first", "memory", "reuse")

    def __init__(self, first: int, memory: HostMemory) -> None:
        self.first = first
        self.memory = memory
        self.reuse = Reuse(max(1024, 2 * memory.num_blocks))
        self._free = list(range(first + memory.num_blocks - 1, first - 1, -1))
        # By block in host memory: a block that is dropped before its save is not saved.
        self._saves: dict[int, int] = {}
        self._loads: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without contents."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that hold cached KV, or will after the next step."""
        return self.memory.num_blocks - len(self._free)

    def save_pays(self, text: int, blocks: int, tokens: int, awaited: bool) -> bool:
        """Whether to save the end of a text; `blocks` and `tokens` count from the text's beginning.

        `text` is a number of its own for each text. `awaited`: a preempted request will look for
        it; otherwise the share of saved blocks that were found again is the estimate.
        """
        memory = self.memory
        if not memory.num_blocks:
            return False
        share = 1.0 if awaited or text % _SAMPLED_TEXTS == 0 else self.reuse.share
        return memory.save_pays(blocks, tokens, share)

    def save(self, blocks: list[int]) -> list[int]:
        """Takes free blocks to which the next step copies `blocks`; enough must be free."""
        taken = [self._free.pop() for _ in blocks]
        self._saves.update(zip(taken, blocks, strict=True))
        return taken

    def load(self, host_blocks: list[int], blocks: list[int]) -> None:
        """The next step copies `host_blocks` to `blocks`; the former are free after it."""
        self._loads.update(zip(host_blocks, blocks, strict=True))

    def free(self, host_blocks: list[int]) -> None:
        """Drops the contents of these blocks."""
        for block in host_blocks:
            self._saves.pop(block, None)
        self._free += host_blocks

    def take(self) -> HostCopies | None:
        """The copies of the step that is being planned; None if there are none."""
        if not self._saves and not self._loads:
            return None
        saves, loads = self._saves, self._loads
        self._saves, self._loads = {}, {}
        self._free += loads
        return HostCopies(
            saved=list(saves.values()),
            saved_host=[block - self.first for block in saves],
            loaded_host=[block - self.first for block in loads],
            loaded=list(loads.values()),
        )

    def check(self, cached: set[int]) -> None:
        """Asserts the invariants; `cached` are the blocks of host memory in the prefix tree."""
        free, leaving = set(self._free), self._loads.keys()
        assert len(free) == len(self._free), "a host block is free twice"
        assert not free & cached, "a free host block is cached"
        assert not leaving & (free | cached), "a host block that leaves is free or cached"
        everything = range(self.first, self.first + self.memory.num_blocks)
        assert free | cached | leaving == set(everything), "a host block is lost"
        assert self._saves.keys() <= cached | leaving, "a dropped block is saved"
        assert len(set(self._loads.values())) == len(self._loads), "a block is loaded twice"
        assert len(set(self._saves.values())) == len(self._saves), "a block is saved twice"
