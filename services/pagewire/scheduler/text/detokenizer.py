"""Incremental detokenization: the text of one sequence, token by token."""

from codecs import utf_8_decode
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from tokenizers import Tokenizer as Backend


class Detokenizer(Protocol):
    """Text of one sequence; the pieces together are the full decoded text."""

    @property
    def at_character(self) -> bool:
        """Whether the next token's text does not depend on those before, see TokenTexts."""
        ...

    def feed(self, token: int) -> str:
        """The text that this token completes; never a part of a character."""
        ...

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character."""
        ...


class ByteLevelDetokenizer:
    """For byte-level BPE, where a token is a fixed string of bytes whatever its neighbours."""

    __slots__ = ("_bytes", "_held", "_names", "_texts")

    def __init__(
        self,
        token_bytes: list[bytes],
        token_texts: list[str | None],
        names: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """`token_texts` has the text of each token where a character may begin, None for tokens
        that end within one. `names` has the special tokens that are shown as text; they have no
        text there."""
        self._names = names
        self._bytes = token_bytes
        self._texts = token_texts
        self._held = b""  # the beginning of a character

    @property
    def at_character(self) -> bool:
        """Whether no part of a character is held back."""
        return not self._held

    def feed(self, token: int) -> str:
        """The text that this token completes; empty for ids outside the vocabulary."""
        if token >= len(self._texts):
            return ""
        text, data = self._texts[token], self._bytes[token]
        if self._names and token in self._names:
            text = self._names[token]
            data = text.encode()
        if text is not None and not self._held:
            return text
        data = self._held + data
        piece, size = utf_8_decode(data, "replace", False)
        self._held = data[size:]
        return piece

    def flush(self) -> str:
        """U+FFFD for an incomplete character."""
        held, self._held = self._held, b""
        return utf_8_decode(held, "replace", True)[0]


class PrefixDetokenizer:
    """For any tokenizer: decodes a window of tokens with and without the new one.

    The window starts where the text before was whole. So the difference of the two texts is the
    token's text in its context (a leading space, a joined character). Byte-fallback tokens are held
    until their run ends: one wrong byte turns every byte of its run into U+FFFD, also those that
    were whole characters. `special_ids` are the tokens that are left out.
    """

    __slots__ = ("_backend", "_fallback_ids", "_ids", "_prefix", "_read", "_special_ids")

    def __init__(
        self, backend: Backend, special_ids: frozenset[int], fallback_ids: frozenset[int]
    ) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._fallback_ids = fallback_ids
        self._ids: list[int] = []
        # The window begins at `_prefix`; the text of the ids before `_read` has been returned.
        self._prefix = 0
        self._read = 0

    @property
    def at_character(self) -> bool:
        """Always False: the text of a token depends on the window."""
        return False

    def feed(self, token: int) -> str:
        """The text that this token completes; empty for special tokens and unknown ids."""
        if token in self._special_ids or self._backend.id_to_token(token) is None:
            return ""  # it would only make the window longer
        self._ids.append(token)
        if token in self._fallback_ids:
            return ""
        text = self._text(len(self._ids))
        if text.endswith("\ufffd"):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """The text of the tokens that are held."""
        return self._advance(self._text(len(self._ids)))

    def _advance(self, text: str) -> str:
        new = text[len(self._text(self._read)) :]
        if new:
            self._prefix, self._read = self._read, len(self._ids)
        return new

    def _text(self, end: int) -> str:
        # Special tokens that are to be left out never get here.
        return str(self._backend.decode(self._ids[self._prefix : end], skip_special_tokens=False))
