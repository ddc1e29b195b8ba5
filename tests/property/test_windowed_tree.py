"""The prefix cache beside a window against a naive model, in which blocks may be missing."""

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagewire.scheduler.core.kv.block_pool import BlockPool

BLOCK_SIZE = 2

# A salt, and the tokens of whole blocks from the beginning of a text.
Prefix = tuple[str, tuple[int, ...]]


@dataclass(eq=False)
class Holder:
    """A sequence in the pool, without its first `freed` blocks."""

    salt: str
    tokens: tuple[int, ...]
    blocks: list[int]
    freed: int
    proven: bool = False

    def prefixes(self) -> list[Prefix]:
        full = len(self.tokens) // BLOCK_SIZE
        return [(self.salt, self.tokens[: n * BLOCK_SIZE]) for n in range(1, full + 1)]

    @property
    def held(self) -> list[int]:
        return self.blocks[self.freed :]


class WindowedCache(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 20), reach=st.integers(0, 4))
    def start(self, num_blocks: int, reach: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, reach=reach)
        self.reach = reach
        self.holders: list[Holder] = []
        self.cached: dict[Prefix, int] = {}
        self.unproven: set[Prefix] = set()
        self.idle: list[int] = []  # cached and not held, the least recently used first

    @rule(salt=st.sampled_from(["", "a"]), tokens=st.lists(st.integers(0, 1), max_size=16))
    def admit(self, salt: str, tokens: list[int]) -> None:
        """A text gets the blocks from which it can continue, and new ones for the rest."""
        new = Holder(salt, tuple(tokens), [], 0)
        new.blocks = self.pool.match(np.array(tokens, np.int32).tobytes(), salt)
        assert new.blocks == self._naive_match(new)
        new.freed = max(0, len(new.blocks) - self.reach)
        need = -(-len(tokens) // BLOCK_SIZE) - len(new.blocks)
        if need > self.pool.available - self.pool.num_idle(new.held):
            return
        self.pool.acquire(new.held)
        self.idle = [block for block in self.idle if block not in new.held]
        for _ in range(need - self.pool.free):
            evicted = self.idle.pop(0)
            self._forget(next(p for p, block in self.cached.items() if block == evicted))
        taken = self.pool.allocate(need)
        assert not {*taken} & {*self.cached.values()}, "a block was taken that should be cached"
        new.blocks = new.blocks + taken
        self.holders.append(new)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99), blocks=st.integers(0, 8))
    def cache(self, choice: int, blocks: int) -> None:
        holder = self._chosen(choice)
        blocks = min(blocks, len(holder.tokens) // BLOCK_SIZE)
        data = np.array(holder.tokens[: blocks * BLOCK_SIZE], np.int32).tobytes()
        self.pool.cache(holder.blocks[:blocks], data, holder.salt, proven=holder.proven)
        for prefix, block in list(zip(holder.prefixes(), holder.blocks, strict=False))[:blocks]:
            if not block:
                continue
            if prefix not in self.cached and not holder.proven:
                self.unproven.add(prefix)
            if self.cached.setdefault(prefix, block) != block:
                return

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99))
    def prove(self, choice: int) -> None:
        holder = self._chosen(choice)
        holder.proven = True
        self.pool.prove(holder.held)
        self.unproven -= {*self._own(holder)}

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99), count=st.integers(1, 3))
    def give_up(self, choice: int, count: int) -> None:
        """A text releases its first blocks."""
        holder = self._chosen(choice)
        end = min(holder.freed + count, len(holder.tokens) // BLOCK_SIZE)
        if end > holder.freed:
            gone = holder.blocks[holder.freed : end]
            holder.blocks[:end], holder.freed = [0] * end, end
            self._release(gone)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99))
    def leave(self, choice: int) -> None:
        self._leave(self._chosen(choice))

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99))
    def fail(self, choice: int) -> None:
        """The unproven blocks of a text and those below are dropped; their holders leave."""
        holder = self._chosen(choice)
        first = next((p for p in self._own(holder) if p in self.unproven), None)
        gone = [p for p in self.unproven if first is not None and _begins_with(p, first)]
        blocks = {self.cached[prefix] for prefix in gone}
        assert self.pool.drop_unproven(holder.held) == blocks
        for prefix in gone:
            self._forget(prefix)
        self.idle = [block for block in self.idle if block not in blocks]
        for other in [h for h in self.holders if h is holder or blocks & {*h.held}]:
            self._leave(other)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        held = {block for holder in self.holders for block in holder.held}
        assert self.pool.used == len(held)
        assert {*self.idle} == {*self.cached.values()} - held
        assert self.pool.idle == len(self.idle)
        assert self.pool.num_nodes == len(self.cached)
        for salt, tokens in self.cached:
            text = Holder(salt, tokens, [], 0)
            found = self.pool.match(np.array(tokens, np.int32).tobytes(), salt)
            assert found == self._naive_match(text)
        nodes = self.pool.outline(1000)
        assert sum(node.blocks for node in nodes) <= len(self.cached)
        assert all(node.parent < place for place, node in enumerate(nodes))

    def teardown(self) -> None:
        """Everything can be evicted in the end."""
        if not hasattr(self, "pool"):
            return
        for holder in list(self.holders):
            self._leave(holder)
        self.pool.allocate(self.pool.available)
        assert self.pool.used == self.pool.total
        assert not self.pool.num_nodes
        self.pool.check()

    def _chosen(self, choice: int) -> Holder:
        return self.holders[choice % len(self.holders)]

    def _own(self, holder: Holder) -> list[Prefix]:
        return [p for p in holder.prefixes() if self.cached.get(p) in {*holder.held}]

    def _naive_match(self, holder: Holder) -> list[int]:
        """The longest prefix of a cached text whose last blocks are all cached."""
        prefixes = holder.prefixes()
        for count in range(len(prefixes), 0, -1):
            seen = prefixes[max(0, count - self.reach) : count]
            known = any(_begins_with(p, prefixes[count - 1]) for p in self.cached)
            if known and all(prefix in self.cached for prefix in seen):
                return [0] * (count - len(seen)) + [self.cached[prefix] for prefix in seen]
        return []

    def _leave(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self._release(holder.held)

    def _release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        held = {block for holder in self.holders for block in holder.held}
        cached = {*self.cached.values()}
        self.idle += [block for block in blocks[::-1] if block in cached and block not in held]

    def _forget(self, prefix: Prefix) -> None:
        del self.cached[prefix]
        self.unproven.discard(prefix)


def _begins_with(prefix: Prefix, head: Prefix) -> bool:
    return prefix[0] == head[0] and prefix[1][: len(head[1])] == head[1]


WindowedCache.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestWindowedCache = WindowedCache.TestCase
