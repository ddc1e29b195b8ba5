"""The masks of a grammar by the place in an output, and matchers that look there first."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from pagewire.worker.protocol.constraints.json_places import Frame, Place, Stage
from pagewire.worker.protocol.constraints.json_shapes import Shape
from pagewire.worker.protocol.constraints.string_tokens import StringTokens
from pagewire.worker.protocol.constraints.token_bans import Words
from pagewire.worker.protocol.constraints.token_matcher import TokenMatcher

# Of one grammar, masks and places; it starts anew behind them.
MAX_BYTES = 32 << 20
_REPORTED = 1 << 20  # so much more is reported
# About what a place and a step from one place to another take.
_PLACE_BYTES, _STEP_BYTES = 1500, 150
# Tokens that a matcher may lack; it gets them when no mask is waited for.
MOST_BEHIND = 8
# To find a place anew takes the mask thread as long as its share of a mask that many threads
# compute. So with many cores outputs must mostly go where others have been.
FEW_CORES = (os.cpu_count() or 1) <= 4
_MOST_NEW = 0.3  # of the steps from place to place, or only some sequences look for them
_COUNTED = 4096  # steps, at least; then older ones count for less
_PROBES = 8  # one of so many sequences goes on, to see whether that changes
# Words of 32 tokens that a mask may have for the others, all 0, to be left out.
_FEW = 64


class Mask:
    """A complete mask of a grammar, for outputs at one place."""

    __slots__ = ("_at", "_some", "_values", "_words", "accepting", "nbytes")

    def __init__(self, words: Words, accepting: bool) -> None:
        """Copies `words [words]`; `accepting`: whether the output may end."""
        self.accepting = accepting
        self._words: Words | None = None
        self._at: NDArray[np.intp] = np.flatnonzero(words)
        self._values: Words = words[self._at]
        self._some: dict[int, int] = {}
        if len(self._at) > _FEW:
            self._words = words.copy()
            self.nbytes = words.nbytes
        else:
            self._some = dict(zip(self._at.tolist(), self._values.tolist(), strict=True))
            self.nbytes = 512 + 128 * len(self._some)

    def allows(self, token: int) -> bool:
        """Whether a token may come."""
        if self._words is None:
            word = self._some.get(token >> 5, 0)
        else:
            word = self._words.item(token >> 5)
        return bool(word >> (token & 31) & 1)

    def write(self, row: Words) -> None:
        """Makes `row [words]` this mask."""
        if self._words is None:
            row.fill(0)
            row[self._at] = self._values
        else:
            row[:] = self._words

    @staticmethod
    def write_all(words: Words, rows: list[tuple[int, "Mask", "Mask | None"]]) -> None:
        """Writes masks into rows of `words [rows, words]`, which has no gaps.

        With each row and its mask comes the one that it has; None if that is not known.
        """
        few: list[tuple[int, Mask]] = []
        to_clear: list[tuple[int, Mask]] = []
        for row, mask, before in rows:
            if mask._words is not None:
                words[row] = mask._words
                continue
            few.append((row, mask))
            if before is None or before._words is not None:
                words[row].fill(0)
            else:
                to_clear.append((row, before))
        flat, width = words.reshape(-1), words.shape[1]
        if to_clear:
            flat[_places(to_clear, width)] = 0
        if few:
            flat[_places(few, width)] = np.concatenate([mask._values for _, mask in few])


def _places(rows: list[tuple[int, Mask]], width: int) -> NDArray[np.intp]:
    """Where masks of few words have these, in an array of rows of `width` words."""
    starts = np.array([row for row, _ in rows], np.intp) * width
    at = [mask._at for _, mask in rows]
    return np.concatenate(at) + np.repeat(starts, [len(each) for each in at])


@dataclass(eq=False, slots=True)
class Entry:
    """What is known for places that have the same mask."""

    mask: Mask | None = None
    seen: bool = False  # it was computed once, and may not come again


@dataclass(eq=False, slots=True)
class Node:
    """A place, and those behind it by the next token, or by the length of a plain one below 0."""

    place: Place
    entry: Entry
    next: dict[int, "Node"] = field(default_factory=dict)
    forced: list[int] | None = None  # tokens, once they are known


class MaskCache:
    """What sequences of one grammar have learned for each other. Threads may share it."""

    def __init__(
        self, shape: Shape, tokens: StringTokens, room: Callable[["MaskCache"], None]
    ) -> None:
        """`room` is called when `nbytes` has grown."""
        self._tokens = tokens
        self._room = room
        self._nodes: dict[Place, Node] = {}
        self._entries: dict[Place, Entry] = {}
        self._frames: dict[Frame, Frame] = {}  # as `Frame.near` has them
        self.nbytes = 0
        self._reported = 0  # bytes that `room` has heard of
        self._steps = self._new_steps = self._sequences = 0
        self._pays = True
        self._root = Place(None, Stage.VALUE, shape)

    def root(self) -> Node:
        """The beginning of an output."""
        return self._node(self._root)

    def enter(self) -> int:
        """A number for a sequence, see `pays`."""
        self._sequences += 1
        return self._sequences

    def pays(self, sequence: int) -> bool:
        """Whether a sequence should look for masks that others have computed."""
        return self._pays or sequence % _PROBES == 0

    def count(self, steps: int) -> None:
        """Counts the tokens that a sequence has taken since it was last asked."""
        self._steps += steps
        if self._steps >= _COUNTED:
            self._pays = FEW_CORES or self._new_steps < _MOST_NEW * self._steps
            self._steps //= 2
            self._new_steps //= 2

    def step(self, node: Node, token: int) -> Node | None:
        """Where an output is behind a token that the grammar allows; None if that is not known."""
        found = node.next.get(token)
        if found is not None:
            return found
        place, key = node.place, token
        length = self._tokens.lengths[token]
        if length and place.in_characters:
            key = -length
            found = node.next.get(key)
            if found is not None:
                return found
            after: Place | None = place.longer(length)
        else:
            text = self._tokens.texts[token]
            after = place.with_plain(text, length > 0)
            if after is None and text:
                after = place.after(text)
        self._new_steps += 1
        if after is None:
            return None
        found = self._node(after)
        if place.text is not None:
            node.next[key] = found
            self._grow(_STEP_BYTES)
        return found

    def store(self, node: Node, words: Words, accepting: bool) -> None:
        """Keeps the mask of a place."""
        entry, place = node.entry, node.place
        if place.text is None or entry.mask is not None:
            return
        if place.raw and not entry.seen:
            entry.seen = True
            return
        mask = Mask(words, accepting)
        entry.mask = mask
        self._grow(mask.nbytes)

    def clear(self) -> None:
        """Forgets all."""
        nodes, entries = list(self._nodes.values()), list(self._entries.values())
        self._nodes, self._entries, self._frames = {}, {}, {}
        self.nbytes = self._reported = 0
        for node in nodes:
            node.next = {}
        for entry in entries:  # sequences may be there
            entry.mask = None

    def _grow(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self.nbytes > MAX_BYTES:
            self.clear()
        elif self.nbytes > self._reported + _REPORTED:
            self._reported = self.nbytes
            self._room(self)

    def _node(self, place: Place) -> Node:
        if place.text is None:
            return Node(place, Entry())
        found = self._nodes.get(place)
        if found is None:
            self._grow(_PLACE_BYTES)
            frame = place.frame
            if frame is not None:
                if (near := self._frames.get(frame)) is None:
                    near = self._frames[frame] = frame.near(self._tokens.most_commas)
                frame = near
            key = place.near(frame, self._tokens.longest_text)
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries.setdefault(key, Entry())
            found = self._nodes.setdefault(place, Node(place, entry))
        return found


class CachedMatcher:
    """A matcher that takes tokens only when a mask that no other sequence has seen is asked for."""

    __slots__ = ("_behind", "_cache", "_computed", "_matcher", "_number", "node")

    def __init__(self, matcher: TokenMatcher, cache: MaskCache | None) -> None:
        """Takes over a matcher at the beginning; without a cache it is all there is."""
        self._matcher = matcher
        self._cache = cache
        self._number = 0 if cache is None else cache.enter()
        self.node: Node | None = None
        if cache is not None and cache.pays(self._number):
            self.node = cache.root()
        self._behind: list[int] = []  # tokens that the matcher has not
        self._computed: tuple[Node, Words, bool] | None = None  # for the cache

    @property
    def known(self) -> Mask | None:
        """The mask of the next token, if it is known."""
        node = self.node
        return None if node is None else node.entry.mask

    @property
    def current(self) -> LLMatcher:
        """What computes the mask of the next token."""
        self._catch_up()
        return self._matcher.current

    def follow(self, token: int) -> bool:
        """Takes the next token without the matcher; False if that cannot be, and nothing is done.

        The mask before must be known, so that a token that the grammar does not allow is not taken.
        """
        node = self.node
        if node is None or (mask := node.entry.mask) is None:
            return False
        found = node.next.get(token)
        if found is None:
            assert self._cache is not None
            if not mask.allows(token) or (found := self._cache.step(node, token)) is None:
                return False
        self.node = found
        self._behind.append(token)
        return True

    def note(self, token: int) -> LLMatcher | None:
        """See `TokenMatcher.note`."""
        if not self._catch_up():
            return None
        noted = self._matcher.note(token)
        if noted is not None:
            self._move(token)
        return noted

    def consume(self, token: int) -> bool:
        """See `TokenMatcher.consume`."""
        if self.follow(token):
            return True
        if not self._catch_up() or not self._matcher.consume(token):
            return False
        self._move(token)
        return True

    def forced_tokens(self) -> list[int]:
        """See `TokenMatcher.forced_tokens`."""
        node = self.node
        if node is not None and node.forced is not None:
            return node.forced
        self._catch_up()
        forced = self._matcher.forced_tokens()
        if node is not None:
            node.forced = forced
        return forced

    def complete(self, mask: Words) -> bool:
        """Completes a mask that `current` has computed; says whether the output may end."""
        self._matcher.complete(mask)
        accepting = self._matcher.current.is_accepting()
        node = self.node
        if node is not None and node.place.text is not None:
            self._computed = node, mask.copy(), accepting
        return accepting

    def settle(self) -> None:
        """Does what need not be done before the mask is used; once a token."""
        cache = self._cache
        if cache is None or self.node is None:
            return
        if (computed := self._computed) is not None:
            self._computed = None
            cache.store(*computed)
        cache.count(1)
        if not (pays := cache.pays(self._number)):
            self.node = None
        if not pays or len(self._behind) >= MOST_BEHIND:
            self._catch_up(mask=False)

    def _move(self, token: int) -> None:
        if self.node is not None and self._cache is not None:
            self.node = self._cache.step(self.node, token)

    def _catch_up(self, mask: bool = True) -> bool:
        behind = self._behind
        if not behind:
            return True
        self._behind = []
        return self._matcher.consume_all(behind, mask)
