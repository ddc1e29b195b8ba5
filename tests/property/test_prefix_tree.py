"""The prefix cache against a naive model: a dictionary from every cached prefix to its block."""

from dataclasses import dataclass

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagewire.scheduler.core.kv.block_pool import BlockPool

BLOCK_SIZE = 2

# A salt, and the tokens of whole blocks from the beginning of a text.
Prefix = tuple[str, tuple[int, ...]]


@dataclass(eq=False)
class Holder:
    """A sequence in the pool."""

    salt: str
    tokens: tuple[int, ...]
    blocks: list[int]
    proven: bool = False

    def prefix(self, blocks: int) -> Prefix:
        return self.salt, self.tokens[: blocks * BLOCK_SIZE]

    def prefixes(self) -> list[Prefix]:
        return [self.prefix(n + 1) for n in range(len(self.tokens) // BLOCK_SIZE)]


class PrefixCache(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 24))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.holders: list[Holder] = []
        self.clock = 0
        # The model: cached prefixes, the last use of each, and the unproven ones.
        self.cached: dict[Prefix, int] = {}
        self.used_at: dict[Prefix, int] = {}
        self.unproven: set[Prefix] = set()

    @rule(salt=st.sampled_from(["", "a"]), tokens=st.lists(st.integers(0, 1), max_size=14))
    def admit(self, salt: str, tokens: list[int]) -> None:
        """A text gets its cached blocks, and new ones for the rest."""
        new = Holder(salt, tuple(tokens), [])
        found = self.pool.match(np.array(tokens, np.int32).tobytes(), salt)
        assert found == self._naive_match(new)
        need = -(-len(tokens) // BLOCK_SIZE) - len(found)
        if need > self.pool.available - self.pool.num_idle(found):
            return
        self.pool.acquire(found)
        new.blocks = found
        self.holders.append(new)
        self._evict_naively(need - self.pool.free)
        taken = self.pool.allocate(need)
        assert not {*taken} & {*self.cached.values()}, "a block was taken that should be cached"
        new.blocks = found + taken

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99), blocks=st.integers(0, 7))
    def cache(self, choice: int, blocks: int) -> None:
        """The first blocks of a text become findable, as at the end of a chunk."""
        holder = self._chosen(choice)
        blocks = min(blocks, len(holder.tokens) // BLOCK_SIZE)
        data = np.array(holder.tokens[: blocks * BLOCK_SIZE], np.int32).tobytes()
        self.pool.cache(holder.blocks[:blocks], data, holder.salt, proven=holder.proven)
        for prefix, block in list(zip(holder.prefixes(), holder.blocks, strict=False))[:blocks]:
            if self.cached.setdefault(prefix, block) != block:
                return
            if prefix not in self.used_at:
                self.used_at[prefix] = 0
                if not holder.proven:
                    self.unproven.add(prefix)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99))
    def prove(self, choice: int) -> None:
        holder = self._chosen(choice)
        holder.proven = True
        self.pool.prove(holder.blocks)
        self.unproven -= {p for p in holder.prefixes() if self.cached.get(p) in holder.blocks}

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99))
    def release(self, choice: int) -> None:
        self._release(self._chosen(choice))

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99))
    def fail(self, choice: int) -> None:
        """The unproven blocks of a text and all below them are dropped; their holders leave."""
        holder = self._chosen(choice)
        own = [p for p in holder.prefixes() if self.cached.get(p) in holder.blocks]
        first = next((p for p in own if p in self.unproven), None)
        gone = [p for p in self.cached if first is not None and _begins_with(p, first)]
        blocks = {self.cached[prefix] for prefix in gone}
        assert self.pool.drop_unproven(holder.blocks) == blocks
        for prefix in gone:
            self._forget(prefix)
        for other in [h for h in self.holders if h is holder or blocks & {*h.blocks}]:
            self._release(other)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        held = {block for holder in self.holders for block in holder.blocks}
        assert self.pool.used == len(held)
        assert self.pool.idle == len({*self.cached.values()} - held)
        for (salt, tokens), block in self.cached.items():
            found = self.pool.match(np.array(tokens, np.int32).tobytes(), salt)
            assert len(found) == len(tokens) // BLOCK_SIZE
            assert found[-1] == block

    def teardown(self) -> None:
        """Everything can be evicted in the end, and in the model's order."""
        if not hasattr(self, "pool"):
            return
        for holder in list(self.holders):
            self._release(holder)
        self._evict_naively(self.pool.idle // 2)
        self.pool.allocate(self.pool.free + self.pool.idle // 2)
        self.agrees_without_holders()
        self.pool.allocate(self.pool.available)
        assert self.pool.used == self.pool.total

    def agrees_without_holders(self) -> None:
        self.pool.check()
        assert self.pool.idle == len(self.cached)
        for (salt, tokens), block in self.cached.items():
            assert self.pool.match(np.array(tokens, np.int32).tobytes(), salt)[-1] == block

    def _chosen(self, choice: int) -> Holder:
        return self.holders[choice % len(self.holders)]

    def _naive_match(self, holder: Holder) -> list[int]:
        found = []
        for prefix in holder.prefixes():
            if prefix not in self.cached:
                break
            found.append(self.cached[prefix])
        return found

    def _release(self, holder: Holder) -> None:
        self.clock += 1
        self.pool.release(holder.blocks)
        self.holders.remove(holder)
        held = {block for other in self.holders for block in other.blocks}
        for prefix in holder.prefixes():
            block = self.cached.get(prefix)
            if block in holder.blocks and block not in held:
                self.used_at[prefix] = self.clock

    def _evict_naively(self, count: int) -> None:
        """The least recently used idle prefix that no other cached prefix continues."""
        held = {block for holder in self.holders for block in holder.blocks}
        for _ in range(count):
            ends = [
                prefix
                for prefix, block in self.cached.items()
                if block not in held
                and not any(p != prefix and _begins_with(p, prefix) for p in self.cached)
            ]
            self._forget(min(ends, key=lambda prefix: self.used_at[prefix]))

    def _forget(self, prefix: Prefix) -> None:
        del self.cached[prefix], self.used_at[prefix]
        self.unproven.discard(prefix)


def _begins_with(prefix: Prefix, head: Prefix) -> bool:
    return prefix[0] == head[0] and prefix[1][: len(head[1])] == head[1]


@given(
    texts=st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=6), min_size=1, max_size=8),
    asked=st.lists(st.sampled_from("ab"), max_size=6),
)
@example(texts=[["a", "b", "b"], ["a", "b", "b", "a"]], asked=["a", "a"])
@settings(max_examples=300, deadline=None)
def test_a_match_ends_at_the_first_block_that_differs(
    texts: list[list[str]], asked: list[str]
) -> None:
    """For any split of texts into runs: blocks after a difference belong to another prompt."""
    pool = BlockPool(64, BLOCK_SIZE)
    cached: dict[str, int] = {}
    for text in texts:
        blocks = pool.match(_data(text))
        pool.acquire(blocks)
        blocks += pool.allocate(len(text) - len(blocks))
        pool.cache(blocks, _data(text), "", proven=True)
        for size, block in enumerate(blocks, 1):
            cached.setdefault("".join(text[:size]), block)
    want = []
    for size in range(1, len(asked) + 1):
        if (block := cached.get("".join(asked[:size]))) is None:
            break
        want.append(block)
    assert pool.match(_data(asked)) == want


def _data(text: list[str]) -> bytes:
    """A block of tokens for each letter."""
    return np.repeat([ord(letter) for letter in text], BLOCK_SIZE).astype(np.int32).tobytes()


PrefixCache.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestPrefixCache = PrefixCache.TestCase
