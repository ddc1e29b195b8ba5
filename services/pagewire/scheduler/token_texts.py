"""The text of every token whose text is the same wherever it stands, for whole steps at once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array


class TokenTexts:
    """Of a byte-level vocabulary: UTF-8 text by token id.

    Tokens that are no whole characters have none. Ids outside the vocabulary have the empty text,
    as they are decoded.
    """

    def __init__(self, texts: Sequence[str | None]) -> None:
        """`texts` are by token id, None for tokens that are no whole characters."""
        data = [b"" if text is None else text.encode() for text in texts]
        # One more entry, for ids outside.
        self._bytes = np.array([*data, b""], object)
        self._sizes = np.array([*map(len, data), 0], np.int64)
        self._whole = np.array([*(text is not None for text in texts), True])

    def whole(self, tokens: Int32Array) -> NDArray[np.bool_]:
        """Which of `tokens [n]` have a text of their own."""
        found: NDArray[np.bool_] = self._whole[self._at(tokens)]
        return found

    def lookup(
        self, tokens: Int32Array, wanted: NDArray[np.bool_]
    ) -> tuple[list[bytes], NDArray[np.int64]]:
        """Texts of `tokens [n]` and their sizes in bytes; empty where not `wanted [n]`."""
        at = np.where(wanted, self._at(tokens), len(self._bytes) - 1)
        return self._bytes[at].tolist(), self._sizes[at]

    def _at(self, tokens: Int32Array) -> Int32Array:
        return np.minimum(tokens, np.int32(len(self._bytes) - 1))
