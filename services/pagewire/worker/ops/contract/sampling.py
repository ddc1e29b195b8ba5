"""Drawing tokens from logits, and their log probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# The torch-free protocol writes penalties and biases in this encoding, so it defines the constants.
from pagewire.worker.protocol.steps.adjustments import (
    BIASED,
    IN_PROMPT,
    MAX_COUNTED,
    NO_TOKEN,
    PENALIZED,
)

__all__ = [
    "BIASED",
    "IN_PROMPT",
    "MAX_COUNTED",
    "NO_TOKEN",
    "PENALIZED",
    "Adjustments",
    "SamplingOps",
    "SamplingState",
    "TokenMasks",
]


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Biases and penalties of logits.

    `kinds` says which rows have any; the other tensors are read for those rows only.

    Attributes:
        kinds: `[rows]` int32, the bits BIASED and PENALIZED.
        slots: `[rows]` int32, the index of each row in the tensors below.
        token_counts: `[slots, vocabulary or more]` int16. The lower 15 bits count how often the
            output of the sequence has the token, up to MAX_COUNTED. The sign bit, IN_PROMPT, says
            whether the prompt has it.
        penalties: `[slots, 3]` float32: repetition, where 1 is off, frequency and presence.
        bias_ids: `[slots, 300]` int32, ascending; NO_TOKEN after the last one.
        biases: `[slots, 300]` float32, added to the logits of `bias_ids`.
    """

    kinds: Tensor
    slots: Tensor
    token_counts: Tensor
    penalties: Tensor
    bias_ids: Tensor
    biases: Tensor


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that may be drawn.

    Attributes:
        rows: `[rows]` int32, the row of `words` for each row of logits; -1 for a row without a
            mask.
        words: `[masks, words]` int32, contiguous, at least a bit for each token: bit `i % 32` of
            word `i // 32` is set if token `i` is allowed.
    """

    rows: Tensor
    words: Tensor


@dataclass(frozen=True, slots=True)
class SamplingState:
    """The sampling parameters of each row; all tensors are on the device of the logits.

    Attributes:
        temperature: `[rows]` float32, 0 is greedy.
        top_k: `[rows]` int32, 0 is off.
        top_p: `[rows]` float32, 1 is off.
        min_p: `[rows]` float32, 0 is off.
        seed: `[rows]` int64, the seed of the request.
        index: `[rows]` int32, the index of the drawn token in its request, from 0.
        min_tokens: `[rows]` int32. The stop tokens cannot be drawn while `index` is below it.
        stop_token_ids: `[rows, 16]` int32, -1 is none.
        adjustments: biases and penalties; None if no row has any.
        masks: the tokens that may be drawn; None if no row has a mask.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    index: Tensor
    min_tokens: Tensor
    stop_token_ids: Tensor
    adjustments: Adjustments | None = None
    masks: TokenMasks | None = None


class SamplingOps(Protocol):
    """Tokens and log probabilities of logits."""

    def sample(self, logits: Tensor, state: SamplingState, filtered: bool = True) -> Tensor:
        """Draw one token for each row.

        Logits are changed in this order: biases are added, stop tokens that are not allowed yet are
        banned, penalties are applied, tokens that a mask excludes are banned, the result is divided
        by the temperature. Then `min_p` and `top_k` filter tokens, then `top_p`, relative to the
        mass that the other two kept. Tokens that tie at the boundary of a filter are all kept.
        Among tied scores the lowest id wins. `logits` itself stays unchanged.

        Args:
            logits: `[rows, vocabulary]`.
            state: the parameters of the rows.
            filtered: False promises that no row has a `top_k`, `top_p`, `min_p`, bias or penalty,
                so that an implementation can skip them.

        Returns:
            `[rows]` int32 token ids.
        """

    def await_masks(self, ready: Tensor, mask_rows: Tensor, stamps: Tensor) -> None:
        """Wait, on the stream, until processes of the host have written all masks of some rows.

        Args:
            ready: `[slots]` int64, memory of the host: the stamp that each slot's mask has reached.
            mask_rows: `[rows]` int32, the slot of each row; -1 for a row without a mask.
            stamps: `[rows]` int64, the stamp that the mask of each row must reach.
        """

    def fetch_masks(self, host: Tensor, mask_rows: Tensor, masks: Tensor) -> None:
        """Copy the masks of some rows to the device.

        Args:
            host: `[slots, words]` int32, memory of the host. `words` is a multiple of 16.
            mask_rows: `[rows]` int32, as in `await_masks`.
            masks: `[slots, words]` int32, written in place.
        """

    def note_time(self, times: Tensor, turns: Tensor) -> None:
        """Store the time of a clock in nanoseconds.

        Args:
            times: `[turns]` int64, memory of the host; one element is written.
            turns: `[rows]` int32; the first value is the index of that element.
        """

    def logprobs(
        self, logits: Tensor, tokens: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the log probability of each row's token, and of its `k` most likely tokens.

        They belong to the softmax of the model's own logits: before biases, bans, penalties,
        masks, temperature and filters.

        Args:
            logits: `[rows, vocabulary]`.
            tokens: `[rows]` int32.
            k: 0 to 20.

        Returns:
            `[rows]` float32 for the tokens, `[rows, k]` int32 ids, most likely first,
            `[rows, k]` float32 for these ids, and `[rows]` int32 ranks of the tokens: one more than
            the number of larger logits in the row.
        """
