"""A table of token texts, which decodes the tokens of a whole step at once."""

from collections.abc import Sequence

import numpy as np

from pagewire.packing import Int32Array

# The size of a token that has no text of its own.
PARTIAL = -1


class TokenTexts:
    """The UTF-8 text of each token of a byte-level vocabulary, where a character may begin.

    Tokens that end within a character are partial, and so are special tokens. Ids outside the
    vocabulary have the empty text, as in decoding.
    """

    def __init__(self, texts: Sequence[str | None]) -> None:
        """`texts` are by token id, None for partial ones."""
        data = [b"" if text is None else text.encode() for text in texts]
        # One more entry for ids outside the vocabulary.
        self._bytes = np.array([*data, b""], object)
        sizes = [PARTIAL if text is None else len(data[i]) for i, text in enumerate(texts)]
        self._sizes = np.array([*sizes, 0], np.int32)

    def lookup(self, tokens: Int32Array) -> tuple[list[bytes], Int32Array]:
        """Texts of `tokens [n]`, and their sizes [n] in bytes, PARTIAL for tokens without one."""
        texts: list[bytes] = self._bytes.take(tokens, mode="clip").tolist()
        return texts, self._sizes.take(tokens, mode="clip")
