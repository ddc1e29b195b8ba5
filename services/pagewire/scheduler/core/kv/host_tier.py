"""Blocks of the host's memory, in which cached KV outlasts its eviction from the device."""

from dataclasses import dataclass

# Blocks that count as found before any was given up.
_FIRST_FOUND = 64.0
# While saving does not pay, one text in so many is saved all the same, to see when it does.
_TRIED = 16


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host memory of one worker: its blocks, and what its use costs, in seconds.

    `prefill_token` is what a prompt token takes at the beginning of a text, `prefill_pair` what
    each token before it adds.
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
        """Whether to copy `blocks` blocks, the tokens from `begin` to `end`, or compute them."""
        return blocks * self.load_block < self.prefill(begin, end)

    def save_pays(self, blocks: int, tokens: int, reused: float) -> bool:
        """Whether to save a text of so many blocks and tokens, if the part `reused` of what is
        saved is wanted again."""
        gained = self.prefill(0, tokens) - blocks * self.load_block
        return reused * gained > blocks * self.save_block


NO_HOST_MEMORY = HostMemory()


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Copies that a step makes before anything else: all saves, then all loads.

    Blocks of the host are numbered from 0. The two lists of each kind are parallel.
    """

    saved: list[int]
    saved_host: list[int]
    loaded_host: list[int]
    loaded: list[int]


class Reuse:
    """What part of the blocks that were saved just in case is wanted again, the latest ones
    counting most. Optimistic at first."""

    __slots__ = ("_dropped", "_found", "_window")

    def __init__(self, window: int) -> None:
        """`window` blocks are remembered."""
        self._window = window
        self._found, self._dropped = _FIRST_FOUND, 0.0

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self._found / (self._found + self._dropped)

    def count(self, found: int = 0, dropped: int = 0) -> None:
        """So many blocks were wanted again, so many were given up."""
        self._found += found
        self._dropped += dropped
        if self._found + self._dropped > self._window:
            self._found, self._dropped = self._found / 2, self._dropped / 2


class HostTier:
    """Which host blocks are free, and the copies that the next step makes.

    Beside those of the device host blocks have the numbers from `first` on. One that is neither
    free nor cached is leaving: the next step copies it to the device, and as its saves come before
    its loads, nothing may be saved there before that step is planned.
    """

    __slots__ = ("_free", "_loads", "_saves", "first", "memory", "reuse")

    def __init__(self, first: int, memory: HostMemory) -> None:
        self.first = first
        self.memory = memory
        self.reuse = Reuse(max(1024, 2 * memory.num_blocks))
        self._free = list(range(first + memory.num_blocks - 1, first - 1, -1))
        # By host block, so that what was given up before the copy is not copied.
        self._saves: dict[int, int] = {}
        self._loads: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that hold cached KV, or will once the next step has run."""
        return self.memory.num_blocks - len(self._free)

    def save_pays(self, text: int, blocks: int, tokens: int, awaited: bool) -> bool:
        """Whether to save the end of a text (any number that tells it from others).

        It has so many blocks and tokens from its beginning to there. `awaited` says that a request
        that waits will want it; otherwise what has become of others tells how likely that is.
        """
        memory = self.memory
        if not memory.num_blocks:
            return False
        share = 1.0 if awaited or text % _TRIED == 0 else self.reuse.share
        return memory.save_pays(blocks, tokens, share)

    def save(self, blocks: list[int]) -> list[int]:
        """Host blocks to which the next step copies `blocks`; there must be as many free ones."""
        taken = [self._free.pop() for _ in blocks]
        self._saves.update(zip(taken, blocks, strict=True))
        return taken

    def load(self, host_blocks: list[int], blocks: list[int]) -> None:
        """The next step copies host blocks, which then hold nothing, to `blocks`."""
        self._loads.update(zip(host_blocks, blocks, strict=True))

    def free(self, host_blocks: list[int]) -> None:
        """What these hold is not wanted any more."""
        for block in host_blocks:
            self._saves.pop(block, None)
        self._free += host_blocks

    def take(self) -> HostCopies | None:
        """The copies, for the step that is being planned; None if there are none."""
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
        """Asserts the invariants; `cached` are the host blocks in the prefix tree."""
        free, leaving = set(self._free), self._loads.keys()
        assert len(free) == len(self._free), "a host block is free twice"
        assert not free & cached, "a free host block is cached"
        assert not leaving & (free | cached), "a host block that leaves is free or cached"
        everything = range(self.first, self.first + self.memory.num_blocks)
        assert free | cached | leaving == set(everything), "a host block is lost"
        assert self._saves.keys() <= cached | leaving, "what nobody wants is saved"
        assert len(set(self._loads.values())) == len(self._loads), "a block is loaded twice"
        assert len(set(self._saves.values())) == len(self._saves), "a block is saved twice"
