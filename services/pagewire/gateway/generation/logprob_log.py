"""Log probabilities: read from a scheduler's messages, and kept until they are formatted."""

from codecs import getincrementaldecoder
from collections import deque
from itertools import accumulate, pairwise
from struct import Struct
from typing import NamedTuple

from pagewire.packing import unpack, unpack_floats
from pagewire.v1 import inference_pb2 as pb

_FLOAT = Struct("<f")
_Utf8Decoder = getincrementaldecoder("utf-8")


class Candidate(NamedTuple):
    """A token that was possible at one position of an output or of a prompt."""

    logprob: float | None  # None for the first token of a prompt
    data: bytes  # may be a part of a character
    token_id: int

    @property
    def text(self) -> str:
        """Its text, with U+FFFD for parts of characters."""
        return self.data.decode(errors="replace")

    @property
    def name(self) -> str:
        """A text that stands for this token only, unlike `text`."""
        return f"token_id:{self.token_id}"


class TokenLogprobs(NamedTuple):
    """A token, and the likeliest tokens at its position, most likely first."""

    token: Candidate
    top: list[Candidate]
    offset: int  # in characters, from the beginning of the choice's text


class CandidateBlock(NamedTuple):
    """The candidates of some tokens, `width` for each, still packed.

    Thousands of tokens may wait to be read. With one object for each candidate, garbage collection
    would block the event loop.
    """

    tokens: int
    width: int
    logprobs: bytes  # float32, little-endian
    sizes: tuple[int, ...]  # bytes of each candidate in `data`
    data: bytes
    ids: bytes  # int32, little-endian

    def read(self) -> list[list[Candidate]]:
        """The candidates of each token; the first one is the token itself."""
        ends = list(accumulate(self.sizes, initial=0))
        pieces = [self.data[begin:end] for begin, end in pairwise(ends)]
        logprobs = unpack_floats(self.logprobs).tolist()
        ids = unpack(self.ids).tolist()
        found = list(map(Candidate._make, zip(logprobs, pieces, ids, strict=True)))
        return [found[at : at + self.width] for at in range(0, len(found), self.width)]


class CandidateReader:
    """Reads the candidates of a message, entry after entry."""

    def __init__(self, message: pb.MultiplexResponse) -> None:
        self._logprobs = message.candidate_logprobs
        self._sizes = tuple(message.candidate_sizes)
        self._data = message.candidate_bytes
        self._ids = message.candidate_ids
        self._at = self._data_at = 0

    def take(self, tokens: int, width: int) -> CandidateBlock:
        """The candidates of the next entry: `width` for each of its `tokens`."""
        begin, end = self._at, self._at + tokens * width
        sizes = self._sizes[begin:end]
        data_begin, data_end = self._data_at, self._data_at + sum(sizes)
        self._at, self._data_at = end, data_end
        return CandidateBlock(
            tokens,
            width,
            self._logprobs[4 * begin : 4 * end],
            sizes,
            self._data[data_begin:data_end],
            self._ids[4 * begin : 4 * end],
        )


class LogprobLog:
    """The log probabilities of one generation, kept until `take`.

    `count` tokens were received, and `total` is the sum of their log probabilities. `waiting`
    tokens were not taken yet.
    """

    __slots__ = ("_blocks", "_decoder", "_offset", "count", "total", "waiting")

    def __init__(self) -> None:
        self.count = self.waiting = 0
        self.total = 0.0
        self._blocks: deque[CandidateBlock] = deque()
        self._decoder = _Utf8Decoder("replace")
        self._offset = 0

    def begin_at(self, offset: int) -> None:
        """Sets the output's first character in the choice's text; called before any `take`."""
        self._offset = offset

    def extend(self, block: CandidateBlock) -> None:
        """Adds the candidates of new tokens; the first one of each is the token itself."""
        self.count += block.tokens
        self.waiting += block.tokens
        for at in range(0, len(block.logprobs), 4 * block.width):
            self.total += _FLOAT.unpack_from(block.logprobs, at)[0]
        self._blocks.append(block)

    def take(self, at_least: int | None = None) -> list[TokenLogprobs]:
        """Removes all waiting tokens, or whole blocks until `at_least` tokens are taken."""
        wanted = self.waiting if at_least is None else min(at_least, self.waiting)
        taken: list[TokenLogprobs] = []
        while len(taken) < wanted:
            for candidates in self._blocks.popleft().read():
                token = candidates[0]
                taken.append(TokenLogprobs(token, candidates[1:], self._offset))
                self._offset += len(self._decoder.decode(token.data))
        self.waiting -= len(taken)
        return taken
