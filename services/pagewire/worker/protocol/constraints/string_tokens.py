"""The tokens of a vocabulary within strings of JSON."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from pagewire.packing import Int32Array
from pagewire.worker.protocol.constraints.token_bans import Words

# Characters that are not plain: those that JSON escapes in strings, and DEL, which JSON does not
# escape.
_SPECIAL = frozenset('"\\\x7f') | frozenset(map(chr, range(0x20)))

# Where a text of JSON ends: outside of strings, in a string, or after a backslash in a string.
OUTSIDE, INSIDE, ESCAPED = range(3)


class StringTokens:
    """The plain tokens of a vocabulary: a string may contain all their characters unescaped.

    Within a string that may have k more characters, plain tokens of at most k characters are
    allowed. Only the other tokens need a matcher, and they are few.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        """`tokenizer` is padded to the model's vocabulary."""
        texts = [_bytes_of(tokenizer, token) for token in range(tokenizer.vocab_size)]
        tokens = {text: token for token, text in enumerate(texts)}
        self._texts = texts
        self._of_byte = {text[0]: token for text, token in tokens.items() if len(text) == 1}
        lengths = [_plain_length(text) for text in texts]
        for token, text in enumerate(texts):
            if tokens[text] != token:  # of tokens with the same text, a matcher may allow one
                lengths[token] = lengths[tokens[text]] = 0
            elif lengths[token] and not self._of_byte.keys() >= set(text):
                lengths[token] = 0
        self.lengths = lengths  # [vocabulary], characters of plain tokens, 0 for others
        self.longest = max(lengths)
        self._masks = _masks_up_to(np.array(lengths, np.int32), self.longest)
        kept = [
            text if not length or len(text) == 1 else b""
            for text, length in zip(texts, lengths, strict=True)
        ]
        # Without plain tokens of several bytes.
        self.others = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokenizer, kept)),
            n_vocab=tokenizer.vocab_size,
            eos_token=tokenizer.eos_tokens,
            slices=[],
        )
        # [3, vocabulary], the place after a token, by the place before it; OUTSIDE for a special
        # token. A text without quotes and backslashes changes the place only if it ends an escape.
        self.after = [bytearray([place]) * len(texts) for place in (OUTSIDE, INSIDE, INSIDE)]
        for token, text in enumerate(texts):
            if not text or b'"' in text or b"\\" in text:
                for place, after in enumerate(self.after):
                    after[token] = _after(text, place)
        self._spelled: dict[int, list[int]] = {}

    def spelled(self, token: int) -> list[int]:
        """Tokens of `others` with the text of a token."""
        if (found := self._spelled.get(token)) is None:
            text = self._texts[token] if self.lengths[token] else b""
            found = self._spelled[token] = [self._of_byte[byte] for byte in text] or [token]
        return found

    def probes(self, character: str) -> list[int]:
        """An ASCII character, repeated more often than in any plain token.

        Empty if no token is the character.
        """
        token = self._of_byte.get(ord(character))
        return [] if token is None else [token] * (self.longest + 16)

    def allow(self, mask: Words, length: int) -> None:
        """Sets the bits of plain tokens of at most `length` characters."""
        np.bitwise_or(mask, self._masks[min(length, self.longest)], out=mask)


class _Vocabulary:
    """The interface of a tokenizer for TokenizerWrapper."""

    bos_token_id = None

    def __init__(self, whole: LLTokenizer, tokens: Sequence[bytes]) -> None:
        self.eos_token_id = whole.eos_token
        self.tokens = tokens
        self.special_token_ids = [i for i, text in enumerate(tokens) if whole.is_special_token(i)]

    def __call__(self, text: bytes) -> list[int]:
        """Never called: a matcher would split forced text with it, and plain strings have none."""
        raise NotImplementedError


def _bytes_of(tokenizer: LLTokenizer, token: int) -> bytes:
    """The text of a token; empty for a special token, which no string of JSON contains."""
    return b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])


def _plain_length(text: bytes) -> int:
    """The number of characters of a text; 0 if it is not plain or has part of a character."""
    try:
        characters = text.decode()
    except UnicodeDecodeError:
        return 0
    return len(characters) if _SPECIAL.isdisjoint(characters) else 0


def _after(text: bytes, place: int) -> int:
    if not text:
        return OUTSIDE
    for byte in text:
        if place == ESCAPED:
            place = INSIDE
        elif byte == ord('"'):
            place = OUTSIDE if place else INSIDE
        elif byte == ord("\\") and place:
            place = ESCAPED
    return place


def _masks_up_to(lengths: Int32Array, longest: int) -> Words:
    """Masks of tokens with 1 to at most i characters, `[longest + 1, words]`."""
    bits = np.zeros((longest + 1, -(-len(lengths) // 32) * 32), np.bool_)
    plain = np.flatnonzero(lengths)
    bits[lengths[plain], plain] = True
    np.logical_or.accumulate(bits, axis=0, out=bits)
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)
