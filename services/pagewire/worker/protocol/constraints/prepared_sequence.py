"""A masked sequence that does some work before its next token is drawn."""

import numpy as np

from pagewire.worker.protocol.constraints.grammars import GrammarError
from pagewire.worker.protocol.constraints.masked_sequence import MaskedSequence
from pagewire.worker.protocol.constraints.token_bans import Words


class MaskBuffer:
    """Memory of a mask, and its address: asking numpy for it takes 3 us, and a mask some 40."""

    def __init__(self, words: Words) -> None:
        """`words [words]` int32."""
        self.words = words
        self.address = words.ctypes.data


class PreparedSequence:
    """Computes the masks of a `MaskedSequence`, some of them before they are needed.

    If a mask allows only one token, that token comes next. The mask after it is computed while the
    device draws it.
    """

    def __init__(self, sequence: MaskedSequence) -> None:
        self._sequence = sequence
        # The token that `_sequence` has and the device has not drawn yet; None if there is none.
        self._expected: int | None = None
        self._error: BaseException | None = None  # of `prepare`
        # The mask after `_expected`; the memory is reused.
        self._next: MaskBuffer | None = None
        self._known = False  # whether `_next` is the mask of the next token

    @property
    def index(self) -> int:
        """The index in the output of the next token."""
        return self._sequence.index - (self._expected is not None)

    @property
    def ended(self) -> bool:
        """Whether a token that ends the sequence has been drawn."""
        return self._sequence.ended and self._expected is None

    def advance(self, token: int) -> None:
        """Takes the next token of the output; GrammarError if the grammar does not allow it."""
        expected, self._expected = self._expected, None
        if self._error is not None:
            raise self._error
        if expected is None:
            self._known = False
            self._sequence.advance(token)
        elif token != expected:
            index = self._sequence.index - 1
            raise GrammarError(
                f"the grammar does not allow token {token} at index {index} of the output: "
                f"{expected} must come"
            )

    def forced_tokens(self) -> list[int]:
        """See `MaskedSequence`. Do not call it after `prepare`."""
        return self._sequence.forced_tokens()

    def mask(self, mask: MaskBuffer) -> None:
        """Writes the mask of the next token; GrammarError if none is left."""
        if self._known and self._next is not None:
            mask.words[:] = self._next.words
        else:
            self._compute(mask)

    def prepare(self, mask: Words) -> None:
        """Does work ahead of later calls. `mask [words]` is that of the next token."""
        if self._expected is not None:
            return
        try:
            if (token := _only_token(mask)) is not None:
                self._expected, self._known = token, False
                self._sequence.advance(token)
                if not self._sequence.ended:
                    if self._next is None:
                        self._next = MaskBuffer(np.empty_like(mask))
                    self._compute(self._next)
                    self._known = True
            self._sequence.catch_up()
        except BaseException as error:  # a panic in Rust is not an Exception
            self._error = error

    def _compute(self, mask: MaskBuffer) -> None:
        if (matcher := self._sequence.matcher) is not None:
            matcher.unsafe_compute_mask_ptr(mask.address, mask.words.nbytes)
        self._sequence.narrow(mask.words)


def _only_token(mask: Words) -> int | None:
    """The only token that a mask allows; None if it does not allow exactly one."""
    if np.count_nonzero(mask) != 1:
        return None
    index = int((mask != 0).argmax())
    word = int(mask[index]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * index + word.bit_length() - 1
