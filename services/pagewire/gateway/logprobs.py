"""Log probabilities: as they arrive from a scheduler, and as they wait for their reader."""

from codecs import getincrementaldecoder
from itertools import accumulate, pairwise
from typing import NamedTuple

from pagewire.packing import unpack, unpack_floats
from pagewire.v1 import inference_pb2 as pb

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


class CandidateReader:
    """Reads the candidates of a message entry by entry."""

    def __init__(self, message: pb.MultiplexResponse) -> None:
        ends = list(accumulate(message.candidate_sizes, initial=0))
        data = message.candidate_bytes
        pieces = [data[begin:end] for begin, end in pairwise(ends)]
        ids = unpack(message.candidate_ids).tolist()
        logprobs = unpack_floats(message.candidate_logprobs).tolist()
        self._all = list(map(Candidate._make, zip(ids, logprobs, pieces, strict=True)))
        self._at = 0

    def take(self, tokens: int, count: int) -> list[list[Candidate]]:
        """Of the next entry's `tokens`, `count` candidates each."""
        begin, self._at = self._at, self._at + tokens * count
        return [self._all[at : at + count] for at in range(begin, self._at, count)]


class LogprobLog:
    """Those of one generation; what its reader has not taken yet waits here.

    `total` is the sum over all `count` tokens received.
    """

    __slots__ = ("_decoder", "_offset", "_waiting", "count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._waiting: list[TokenLogprobs] = []
        self._decoder = _Utf8Decoder("replace")
        self._offset = 0

    def extend(self, tokens: list[list[Candidate]]) -> None:
        """Takes in the candidates of new tokens, each token first among its own."""
        self.count += len(tokens)
        for candidates in tokens:
            token = candidates[0]
            self.total += token.logprob
            self._waiting.append(TokenLogprobs(token, candidates[1:], self._offset))
            self._offset += len(self._decoder.decode(token.data))

    def take(self) -> list[TokenLogprobs]:
        """What has arrived since the last call."""
        taken, self._waiting = self._waiting, []
        return taken
