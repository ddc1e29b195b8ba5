"""The model's tokenizer: text to token ids, and token ids to text as they come.

Read from tokenizer.json with the `tokenizers` library, which needs no torch.
"""

import json
from codecs import utf_8_decode
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer as Backend

from pagewire.config import SchedulerConfig
from pagewire.errors import invalid
from pagewire.limits import MAX_STOP_IDS, MAX_STOP_TOKEN_IDS
from pagewire.packing import Int32Array
from pagewire.sampling import SamplingParams
from pagewire.scheduler.text.chat_template import ChatTemplate
from pagewire.scheduler.text.token_texts import TokenTexts

# A longer text than this of a prompt's most tokens is likely to have too many of them: that is
# proved from its beginning, where it can be, before the whole of it is encoded.
_CHARACTERS_A_TOKEN = 8
# Tokens that end so far before a cut are the same in the whole text: an added token may begin
# there, or a run of white space.
_UNCERTAIN_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class TextBounds:
    """What is taken of text before any work is done on it: see the settings of the same names."""

    max_prompt_chars: int = SchedulerConfig.max_prompt_chars
    max_messages: int = SchedulerConfig.max_messages
    max_template_bytes: int = SchedulerConfig.max_template_bytes
    max_template_nodes: int = SchedulerConfig.max_template_nodes


class TooManyTokensError(Exception):
    """A text has more than `most` tokens."""

    def __init__(self, most: int) -> None:
        super().__init__(f"more than {most} tokens")
        self.most = most


class Detokenizer(Protocol):
    """Text of one sequence, token by token; the pieces together are the full decoded text."""

    @property
    def at_character(self) -> bool:
        """Whether the next token's text does not depend on those before, see TokenTexts."""
        ...

    def feed(self, token: int) -> str:
        """The text that this token completes; never a part of a character."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character."""
        ...


class Tokenizer:
    """What the scheduler reads of a model folder: tokenizer, chat template, generation defaults."""

    def __init__(self, folder: Path, bounds: TextBounds = TextBounds()) -> None:
        """FileNotFoundError names the file that is missing."""
        self.bounds = bounds
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; the scheduler needs the model's tokenizer")
        self._backend = Backend.from_file(str(path))
        self._backend.no_truncation()
        self._backend.no_padding()
        self.chat_template = ChatTemplate.load(folder)
        self.eos_token_ids = _eos_token_ids(folder)
        self.default_sampling = _default_sampling(folder)
        added = self._backend.get_added_tokens_decoder()
        # Whether a token may take the white space around it, however long that is.
        self._strips = any(token.lstrip or token.rstrip for token in added.values())
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._table = _byte_level_table(self._backend, self._special_ids)
        self._fallback_ids = _byte_fallback_ids(self._backend)
        self._all_bytes = self._bytes_in_texts()
        self._keeps_all = bool(self._all_bytes) and not self._strips and _keeps_all(self._backend)
        self._token_bytes: dict[int, bytes] = {}
        self.token_texts = TokenTexts(self._table[1] if self._table is not None else ())

    @property
    def vocab_size(self) -> int:
        """Token ids that have a text; the model may know more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> Int32Array:
        """Token ids [n], at most `most` if that is given.

        TooManyTokensError, after as much work as proves it. RequestError for a text too long to
        try. Takes about 1 us a character and holds the interpreter's lock meanwhile.
        """
        if len(text) > self.bounds.max_prompt_chars:
            raise invalid(
                "prompt",
                f"the prompt has {len(text)} characters and at most {self.bounds.max_prompt_chars} "
                "are taken (max_prompt_chars); shorten it",
            )
        if most is not None and len(text) > _CHARACTERS_A_TOKEN * most:
            if self._least_tokens(text) > most:
                raise TooManyTokensError(most)
            cut = _CHARACTERS_A_TOKEN * most + _UNCERTAIN_CHARACTERS
            if self._certain_tokens(text[:cut]) > most:
                raise TooManyTokensError(most)
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        if most is not None and len(encoding.ids) > most:
            raise TooManyTokensError(most)
        return np.array(encoding.ids, dtype=np.int32)

    def _least_tokens(self, text: str) -> int:
        """A lower bound: a token stands for bytes that the text has, and for so many at most.

        0 where the tokenizer may leave characters out.
        """
        if not self._keeps_all:
            return 0
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        there = set("".join(set(text)).encode())
        longest = max((len(data) for data in self._all_bytes if there.issuperset(data)), default=1)
        return len(text.encode()) // longest

    def _certain_tokens(self, beginning: str) -> int:
        """How many tokens the whole text has at least, by its beginning.

        Words before the last ones do not depend on what follows: the text is cut into words from
        the left, and each is encoded for itself.
        """
        if self._strips:
            return 0
        encoding = self._backend.encode(beginning, add_special_tokens=False)
        end = len(beginning) - _UNCERTAIN_CHARACTERS
        last = next((w for w, (_, at) in _backwards(encoding) if at <= end), None)
        if last is None:
            return 0
        return sum(1 for word in encoding.word_ids if word is not None and word < last)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids at once."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, as they are within a text; of a special token its name.

        Empty for ids that have no text.
        """
        known = self._token_bytes.get(token)
        if known is None:
            known = self._token_bytes[token] = self._bytes_of(token)
        return known

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder that leaves special tokens out."""
        if self._table is not None:
            return ByteLevelDetokenizer(*self._table)
        return PrefixDetokenizer(self._backend, self._special_ids, self._fallback_ids)

    def _bytes_in_texts(self) -> list[bytes]:
        """Of each token what it stands for in a text, added tokens included."""
        if self._table is None:
            return []
        added = [t.content.encode() for t in self._backend.get_added_tokens_decoder().values()]
        return [*filter(None, self._table[0]), *added]

    def _bytes_of(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        if name is None or token in self._special_ids:
            return (name or "").encode()
        if self._table is not None:
            return self._table[0][token]
        if token in self._fallback_ids:
            return bytes([int(name[1:-1], 16)])
        # A decoder may treat the beginning of a text in its own way: look at what comes after.
        alone = self.decode([token])
        return self.decode([token, token])[len(alone) :].encode()


class TokenIdsOnly:
    """Stands in for a Tokenizer where the model has none: refuses text, takes token ids."""

    bounds = TextBounds()
    chat_template = None
    token_texts = TokenTexts(())

    def __init__(self, folder: Path) -> None:
        self.eos_token_ids = _eos_token_ids(folder)
        self.default_sampling = _default_sampling(folder)

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> Int32Array:
        """Refused."""
        raise invalid("prompt", "this server has no tokenizer; give the prompt as token ids")

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Refused."""
        raise invalid("token_ids", "this server has no tokenizer; token ids have no text here")

    def token_bytes(self, token: int) -> bytes:
        """Empty."""
        return b""

    def detokenizer(self) -> Detokenizer:
        """Refused."""
        raise invalid("detokenize", "this server has no tokenizer; set detokenize to false")


class ByteLevelDetokenizer:
    """For byte-level BPE, where a token is a fixed string of bytes whatever its neighbours."""

    __slots__ = ("_bytes", "_held", "_texts")

    def __init__(self, token_bytes: list[bytes], token_texts: list[str | None]) -> None:
        """`token_texts` has the text of each token where a character may begin, None for tokens
        that end within one."""
        self._bytes = token_bytes
        self._texts = token_texts
        self._held = b""  # the beginning of a character

    @property
    def at_character(self) -> bool:
        """See Detokenizer."""
        return not self._held

    def feed(self, token: int) -> str:
        """See Detokenizer."""
        if token >= len(self._texts):
            return ""
        text = self._texts[token]
        if text is not None and not self._held:
            return text
        data = self._held + self._bytes[token]
        piece, size = utf_8_decode(data, "replace", False)
        self._held = data[size:]
        return piece

    def flush(self) -> str:
        """See Detokenizer."""
        held, self._held = self._held, b""
        return utf_8_decode(held, "replace", True)[0]


class PrefixDetokenizer:
    """For any tokenizer: decodes a window of tokens with and without the new one.

    The window starts at a point where the text before was whole, so that what a token adds in
    its context (a leading space, a joined character) is the difference of the two texts.
    Byte-fallback tokens are held until their run ends: one wrong byte turns every byte of its
    run into U+FFFD, also those that were whole characters.
    """

    __slots__ = ("_backend", "_fallback_ids", "_ids", "_prefix", "_read", "_special_ids")

    def __init__(
        self, backend: Backend, special_ids: frozenset[int], fallback_ids: frozenset[int]
    ) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._fallback_ids = fallback_ids
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    @property
    def at_character(self) -> bool:
        """See Detokenizer: here the text depends on the window."""
        return False

    def feed(self, token: int) -> str:
        """See Detokenizer."""
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
        """See Detokenizer."""
        return self._advance(self._text(len(self._ids)))

    def _advance(self, text: str) -> str:
        new = text[len(self._text(self._read)) :]
        if new:
            self._prefix, self._read = self._read, len(self._ids)
        return new

    def _text(self, end: int) -> str:
        return str(self._backend.decode(self._ids[self._prefix : end], skip_special_tokens=True))


def _backwards(encoding: Any) -> Iterable[tuple[int | None, tuple[int, int]]]:
    """Word and offsets of each token, the last first."""
    return zip(reversed(encoding.word_ids), reversed(encoding.offsets), strict=True)


def _keeps_all(backend: Backend) -> bool:
    """Whether tokens stand for all of a text, as its normalizer leaves it."""
    if any(backend.token_to_id(character) is None for character in _bytes_of_characters()):
        return False  # bytes without a token are left out, or many become one
    spec = json.loads(backend.to_str())
    if spec.get("normalizer") not in (None, {"type": "NFC"}):
        return False
    step = spec.get("pre_tokenizer") or {"type": None}
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    return all(
        each["type"] in ("ByteLevel", "Digits")
        or (each["type"] == "Split" and each.get("behavior") != "Removed")
        for each in steps
    )


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids, from generation_config.json before config.json, as is the custom."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            ids = json.loads(path.read_text()).get("eos_token_id")
            if ids is not None:
                return _few_enough(tuple(ids) if isinstance(ids, list) else (int(ids),), path)
    return ()


def _default_sampling(folder: Path) -> SamplingParams:
    """What generation_config.json recommends for requests that do not say otherwise."""
    path = folder / "generation_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return SamplingParams(**{n: config[n] for n in names if config.get(n) is not None})


def _few_enough(ids: tuple[int, ...], path: Path) -> tuple[int, ...]:
    most = MAX_STOP_IDS - MAX_STOP_TOKEN_IDS
    if len(ids) > most:
        raise ValueError(f"{path} has {len(ids)} end-of-sequence ids; at most {most} are supported")
    return ids


def _byte_fallback_ids(backend: Backend) -> frozenset[int]:
    """Ids of the tokens `<0x00>` to `<0xFF>`, each one byte to a byte-fallback decoder."""
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(index for index in ids if index is not None)


def _byte_level_table(
    backend: Backend, special_ids: frozenset[int]
) -> tuple[list[bytes], list[str | None]] | None:
    """Bytes of each id, and its text where a character may begin, None if it ends within one;
    None if not byte-level."""
    spec = json.loads(backend.to_str())
    if not _is_byte_level(spec.get("decoder")):
        return None
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    token_bytes = [b""] * size
    byte_of = _bytes_of_characters()
    for token, index in vocab.items():
        if index not in special_ids:
            token_bytes[index] = _token_bytes(token, byte_of)
    return token_bytes, [_text_of_itself(data) for data in token_bytes]


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _token_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    if all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    return token.encode()


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 bytes stand for themselves and the others take code points from 256 up, in
    order: the mapping of GPT-2's byte-level BPE.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def _text_of_itself(data: bytes) -> str | None:
    """The text of a token that comes where a character may begin; None if it ends within one."""
    text, size = utf_8_decode(data, "replace", False)
    return text if size == len(data) else None
