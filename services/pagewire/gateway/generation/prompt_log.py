"""Prompt data in an answer: echoed text, and log probabilities of the prompt's tokens."""

from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagewire.errors import invalid
from pagewire.gateway.generation.logprob_log import Candidate, TokenLogprobs
from pagewire.packing import Int32Array, unpack, unpack_floats
from pagewire.v1 import inference_pb2 as pb

_Utf8Decoder = getincrementaldecoder("utf-8")
_CONTINUATION, _MASK = 0b1000_0000, 0b1100_0000  # of the bytes after the first one of a character


@dataclass(frozen=True, slots=True)
class PromptWishes:
    """The data of one prompt that an answer must contain."""

    # Whether the choices begin with the prompt's text. `text` is None if the scheduler sends it.
    echo: bool = False
    text: str | None = None
    # The number of likeliest tokens at each token, in `logprobs` and in `prompt_logprobs`. None
    # for no such log probabilities.
    echoed_top: int | None = None
    top: int | None = None
    # Whether the answer has the ids of the tokens.
    ids: bool = False

    @property
    def num_top(self) -> int | None:
        """How many of the likeliest tokens the scheduler must send; None for nothing."""
        wanted = [top for top in (self.echoed_top, self.top) if top is not None]
        return max(wanted, default=None)

    @property
    def needs_scheduler(self) -> bool:
        """Whether the scheduler must send any of this data."""
        return self.ids or self.num_top is not None or (self.echo and self.text is None)


class PromptBudget:
    """Bounds the log probabilities of all prompts of an answer, which may repeat each prompt."""

    __slots__ = ("_choices", "_left", "_most")

    def __init__(self, most: int, choices: int) -> None:
        """`choices`: how many choices of the answer repeat the log probabilities of a prompt."""
        self._most = self._left = most
        self._choices = choices

    def take(self, tokens: int, top: int) -> None:
        """Counts a prompt; RequestError if the answer would have too many."""
        self._left -= tokens * (top + 1) * self._choices
        if self._left < 0:
            raise invalid(
                "prompt",
                f"the prompts have more than {self._most} log probabilities (max_prompt_logprobs), "
                "those of the likeliest tokens and of all choices counted: send fewer or shorter "
                "prompts, or lower prompt_logprobs, logprobs or n",
            )


class PromptReader(Protocol):
    """Waits for a PromptLog."""

    def prompt_arrived(self) -> None:
        """The PromptLog has everything."""


class ScoredToken(NamedTuple):
    """A prompt token with its log probability, and the likeliest tokens at its place."""

    token: Candidate
    rank: int
    top: list[Candidate]


class PromptLog:
    """The data of one prompt for the answer; the prompt's candidates share it.

    One candidate asks the scheduler for the data. The others wait, because all choices begin with
    it. The arrays stay packed: half a million objects, one per token, would block the event loop.
    """

    __slots__ = (
        "_budget",
        "_data",
        "_distinct",
        "_ends",
        "_logprobs",
        "_ranks",
        "_readers",
        "_tokens",
        "_top_ids",
        "_top_logprobs",
        "arrived",
        "text",
        "wishes",
    )

    def __init__(self, wishes: PromptWishes, budget: PromptBudget) -> None:
        self.wishes = wishes
        self.arrived = not wishes.needs_scheduler
        self.text = wishes.text or ""
        self._budget = budget
        self._readers: list[PromptReader] = []
        self._tokens: Int32Array = np.empty(0, np.int32)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt; 0 before they have arrived."""
        return len(self._tokens)

    @property
    def token_ids(self) -> list[int]:
        """The prompt's tokens; none before they have arrived."""
        ids: list[int] = self._tokens.tolist()
        return ids

    def tell(self, reader: PromptReader) -> None:
        """Calls `reader` when the data arrives, which has not happened yet."""
        self._readers.append(reader)

    def receive(self, message: pb.PromptOutput) -> None:
        """Stores the scheduler's message; a repeated one is ignored.

        RequestError if the answer would have too many log probabilities.
        """
        if self.arrived:
            return
        self._tokens = unpack(message.token_ids)
        if self.wishes.echo and self.wishes.text is None:
            self.text = message.text
        top = self.wishes.num_top
        if top is not None:
            self._budget.take(len(self._tokens) - 1, top)
            self._logprobs = unpack_floats(message.logprobs)
            self._ranks = unpack(message.ranks)
            shape = (len(self._logprobs), top)
            self._top_ids = unpack(message.top_token_ids).reshape(shape)
            self._top_logprobs = unpack_floats(message.top_logprobs).reshape(shape)
            self._distinct = unpack(message.distinct_ids)
            self._ends = np.cumsum(message.distinct_sizes, dtype=np.int64)
            self._data = message.distinct_bytes
        self.arrived = True
        for reader in self._readers:
            reader.prompt_arrived()
        self._readers.clear()

    def scored(self, begin: int, end: int, top: int) -> list[ScoredToken]:
        """The prompt tokens `begin` to `end` - 1; `begin` is at least 1."""
        rows = slice(begin - 1, end - 1)
        ids, top_ids = self._tokens[begin:end], self._top_ids[rows, :top]
        pieces = iter(self._pieces(np.hstack((ids[:, None], top_ids)).ravel()))
        found = []
        for token, logprob, rank, others, values in zip(
            ids.tolist(),
            self._logprobs[rows].tolist(),
            self._ranks[rows].tolist(),
            top_ids.tolist(),
            self._top_logprobs[rows, :top].tolist(),
            strict=True,
        ):
            own = Candidate(logprob, next(pieces), token)
            likeliest = [
                Candidate(value, next(pieces), other)
                for value, other in zip(values, others, strict=True)
            ]
            found.append(ScoredToken(own, rank, likeliest))
        return found

    def echoed(self) -> "EchoedTokens":
        """The tokens as `logprobs` of an echoing choice has them, to be read once."""
        excess = max(0, self._num_characters() - len(self.text))
        return EchoedTokens(self, excess)

    @property
    def first(self) -> Candidate:
        """The first token, which has no log probability."""
        return Candidate(None, next(self._pieces(self._tokens[:1])), int(self._tokens[0]))

    def _pieces(self, ids: Int32Array) -> Iterator[bytes]:
        """The bytes of tokens `[n]`."""
        if not len(self._distinct):  # the server has no text
            yield from (b"" for _ in ids)
            return
        places = np.searchsorted(self._distinct, ids)
        ends = self._ends[places]
        begins = np.where(places > 0, self._ends[places - 1], 0)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            yield self._data[begin:end]

    def _num_characters(self) -> int:
        """The characters of all tokens together: the number of bytes that begin a character."""
        if not len(self._distinct):
            return 0
        data = np.frombuffer(self._data, np.uint8)
        starts: NDArray[np.int64] = np.zeros(len(data) + 1, np.int64)
        np.cumsum((data & _MASK) != _CONTINUATION, out=starts[1:])
        before = starts[np.concatenate(([0], self._ends))]
        return int(np.diff(before)[np.searchsorted(self._distinct, self._tokens)].sum())


class EchoedTokens:
    """Reads the tokens of an echoed prompt, as LogprobLog reads those of the output.

    A tokenizer may put characters before the text, such as the name of a special token or a space.
    These `excess` characters are not part of the echoed text and do not count in offsets.
    """

    __slots__ = ("_at", "_decoder", "_excess", "_offset", "_prompt")

    def __init__(self, prompt: PromptLog, excess: int) -> None:
        self._prompt = prompt
        self._excess = excess
        self._decoder = _Utf8Decoder("replace")
        self._offset = self._at = 0

    @property
    def waiting(self) -> int:
        """Tokens that were not taken yet."""
        return self._prompt.num_tokens - self._at

    def take(self, at_least: int | None = None) -> list[TokenLogprobs]:
        """Removes the next `at_least` tokens, or all; the first one has no log probability."""
        prompt, begin = self._prompt, self._at
        end = prompt.num_tokens if at_least is None else min(begin + at_least, prompt.num_tokens)
        self._at = end
        taken = []
        if begin == 0 < end:
            taken.append(self._next(prompt.first, []))
        top = prompt.wishes.echoed_top or 0
        tokens = prompt.scored(max(1, begin), max(1, end), top)
        taken += [self._next(scored.token, scored.top) for scored in tokens]
        return taken

    def _next(self, token: Candidate, top: list[Candidate]) -> TokenLogprobs:
        offset = max(0, self._offset - self._excess)
        self._offset += len(self._decoder.decode(token.data))
        return TokenLogprobs(token, top, offset)
