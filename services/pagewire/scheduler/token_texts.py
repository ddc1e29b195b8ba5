"""The text of every token whose text is the same wherever it stands, for whole steps at once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array, UInt32Array


class TokenTexts:
    """Of a byte-level vocabulary: UTF-8 text by token id, for where a character may begin.

    Tokens that end within a character, the partial ones, have none. Ids outside the vocabulary
    have the empty text, as they are decoded.
    """

    def __init__(self, texts: Sequence[str | None]) -> None:
        """`texts` are by token id, None for tokens that end within a character."""
        data = [b"" if text is None else text.encode() for text in texts]
        # One more entry, for ids outside.
        self._bytes = np.array([*data, b""], object)
        self._sizes = np.array([*map(len, data), 0], np.uint32)
        self._partial = np.array([*(text is None for text in texts), False])

    def lookup(self, tokens: Int32Array) -> tuple[list[bytes], UInt32Array, NDArray[np.bool_]]:
        """Texts of `tokens [n]`, their sizes in bytes, and which tokens are partial."""
        texts: list[bytes] = self._bytes.take(tokens, mode="clip").tolist()
        return (
            texts,
            self._sizes.take(tokens, mode="clip"),
            self._partial.take(tokens, mode="clip"),
        )
