"""The text of every token whose text is the same wherever it stands, for whole steps at once."""

from collections.abc import Sequence

import numpy as np

from pagewire.packing import Int32Array

# Stands for the size of the text of a token that has none.
PARTIAL = -1


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
        sizes = [PARTIAL if text is None else len(data[i]) for i, text in enumerate(texts)]
        self._sizes = np.array([*sizes, 0], np.int32)

    def lookup(self, tokens: Int32Array) -> tuple[list[bytes], Int32Array]:
        """Texts of `tokens [n]`, and their sizes in bytes: PARTIAL for tokens that have none."""
        texts: list[bytes] = self._bytes.take(tokens, mode="clip").tolist()
        return texts, self._sizes.take(tokens, mode="clip")
