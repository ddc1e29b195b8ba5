"""Log probabilities: as they arrive from a scheduler, and as they wait for their reader."""

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
    """A token at some place of an output."""

    token_id: int
    logprob: float
    data: bytes  # its bytes, perhaps a part of a character

    @property
    def text(self) -> str:
        """Its text, with U+FFFD for parts of characters."""
        return self.data.decode(errors="replace")


class TokenLogprobs(NamedTuple):
    """A token of an output, and the likeliest ones at its place, most likely first."""

    token: Candidate
    top: list[Candidate]
    offset: int  # characters of the tokens before it


class CandidateBlock(NamedTuple):
    """The candidates of some tokens, `width` of each, as they came.

    Thousands may wait for their reader. As objects of their own they would make each collection
    of garbage hold the event loop up.
    """

    tokens: int
    width: int
    ids: bytes  # int32, little-endian
    logprobs: bytes  # float32, little-endian
    sizes: tuple[int, ...]  # of each candidate's part of `data`
    data: bytes

    def read(self) -> list[list[Candidate]]:
        """For each token its candidates, the token itself first."""
        ends = list(accumulate(self.sizes, initial=0))
        pieces = [self.data[begin:end] for begin, end in pairwise(ends)]
        ids, logprobs = unpack(self.ids).tolist(), unpack_floats(self.logprobs).tolist()
        found = list(map(Candidate._make, zip(ids, logprobs, pieces, strict=True)))
        return [found[at : at + self.width] for at in range(0, len(found), self.width)]


class CandidateReader:
    """Reads the candidates of a message entry by entry."""

    def __init__(self, message: pb.MultiplexResponse) -> None:
        self._ids = message.candidate_ids
        self._logprobs = message.candidate_logprobs
        self._sizes = tuple(message.candidate_sizes)
        self._data = message.candidate_bytes
        self._at = self._data_at = 0

    def take(self, tokens: int, width: int) -> CandidateBlock:
        """Of the next entry's `tokens`, `width` candidates each."""
        begin, end = self._at, self._at + tokens * width
        sizes = self._sizes[begin:end]
        data_begin, data_end = self._data_at, self._data_at + sum(sizes)
        self._at, self._data_at = end, data_end
        return CandidateBlock(
            tokens,
            width,
            self._ids[4 * begin : 4 * end],
            self._logprobs[4 * begin : 4 * end],
            sizes,
            self._data[data_begin:data_end],
        )


class LogprobLog:
    """Those of one generation; what its reader has not taken yet waits here.

    `total` is the sum over all `count` tokens received, `waiting` how many were not taken.
    """

    __slots__ = ("_blocks", "_decoder", "_offset", "count", "total", "waiting")

    def __init__(self) -> None:
        self.count = self.waiting = 0
        self.total = 0.0
        self._blocks: deque[CandidateBlock] = deque()
        self._decoder = _Utf8Decoder("replace")
        self._offset = 0

    def extend(self, block: CandidateBlock) -> None:
        """Takes in the candidates of new tokens, each token first among its own."""
        self.count += block.tokens
        self.waiting += block.tokens
        for at in range(0, len(block.logprobs), 4 * block.width):
            self.total += _FLOAT.unpack_from(block.logprobs, at)[0]
        self._blocks.append(block)

    def take(self, least: int | None = None) -> list[TokenLogprobs]:
        """What has arrived since the last call: all, or whole blocks with `least` tokens."""
        wanted = self.waiting if least is None else min(least, self.waiting)
        taken: list[TokenLogprobs] = []
        while len(taken) < wanted:
            for candidates in self._blocks.popleft().read():
                token = candidates[0]
                taken.append(TokenLogprobs(token, candidates[1:], self._offset))
                self._offset += len(self._decoder.decode(token.data))
        self.waiting -= len(taken)
        return taken
