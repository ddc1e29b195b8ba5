"""The constraint of a sequence as it arrives."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagewire.errors import invalid
from pagewire.packing import Int32Array, pack, unpack
from pagewire.v1 import worker_pb2 as pb

_ARRAYS = ("allowed_token_ids", "banned_token_ids", "banned_lengths", "reasoning_end_ids")


def _none() -> Int32Array:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Constraint:
    """See `Constraint` in worker.proto."""

    grammar: str = ""
    begin_after: str = ""
    end_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    allowed_token_ids: Int32Array = field(default_factory=_none)  # [allowed]; empty: all
    banned_token_ids: Int32Array = field(default_factory=_none)  # [sum of lengths]
    banned_lengths: Int32Array = field(default_factory=_none)  # [sequences]
    max_reasoning_tokens: int = 0
    reasoning_begin: str = ""
    reasoning_end: str = ""
    reasoning_end_ids: Int32Array = field(default_factory=_none)  # [tokens]; empty: no limit
    grammar_field: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles arrays as bytes: numpy's own way takes 12 us for each."""
        values = [getattr(self, name) for name in self.__slots__]
        return _unpickled, tuple([pack(v) if isinstance(v, np.ndarray) else v for v in values])

    @classmethod
    def from_proto(cls, message: pb.Constraint) -> "Constraint":
        """Decodes a message; its grammar is not compiled yet.

        RequestError INVALID_ARGUMENT if its arrays are malformed.
        """
        arrays = {}
        for name in _ARRAYS:
            if data := getattr(message, name):  # most are empty
                if len(data) % 4:
                    raise invalid(name, f"{name} has {len(data)} bytes; it must be a multiple of 4")
                arrays[name] = unpack(data)
        return cls(
            grammar=message.grammar,
            begin_after=message.begin_after,
            end_token_ids=tuple(message.end_token_ids),
            min_tokens=message.min_tokens,
            max_reasoning_tokens=message.max_reasoning_tokens,
            reasoning_begin=message.reasoning_begin,
            reasoning_end=message.reasoning_end,
            grammar_field=message.grammar_field,
            **arrays,
        )

    def fault(self, vocab_size: int) -> str | None:
        """Why the constraint is invalid; None if it is valid. The grammar is not compiled."""
        given = (self.allowed_token_ids, self.banned_token_ids, self.reasoning_end_ids)
        if not all(0 <= token < vocab_size for token in self.end_token_ids) or any(
            len(ids) and (ids.min() < 0 or ids.max() >= vocab_size) for ids in given
        ):
            return f"a token id of the constraint is not in the vocabulary of {vocab_size}"
        lengths, banned = self.banned_lengths, len(self.banned_token_ids)
        if (len(lengths) or banned) and ((lengths < 1).any() or lengths.sum() != banned):
            return "banned_lengths must be at least 1 and add up to the banned_token_ids"
        if self.grammar and not self.end_token_ids:
            return "a grammar needs end_token_ids, or its sequence could not end"
        if bool(self.reasoning_end) != bool(len(self.reasoning_end_ids)):
            return "reasoning_end and reasoning_end_ids need each other"
        if self.begin_after and not self.grammar:
            return "begin_after needs a grammar"
        return None

    def banned(self) -> list[list[int]]:
        """The sequences of tokens that the output must not contain."""
        ends = np.cumsum(self.banned_lengths)[:-1]
        return [tokens.tolist() for tokens in np.split(self.banned_token_ids, ends) if len(tokens)]


def _unpickled(*values: Any) -> Constraint:
    given: list[Any] = [unpack(v) if isinstance(v, bytes) else v for v in values]
    return Constraint(*given)
