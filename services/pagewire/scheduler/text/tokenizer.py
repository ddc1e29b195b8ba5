"""The model's tokenizer: text to token ids, and the parts that turn ids into text.

Read from tokenizer.json with the `tokenizers` library, which needs no torch. For other tokenizers,
transformers makes such a file; see `pagewire.tokenizer_conversion`.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from pagewire.config import SchedulerConfig
from pagewire.errors import RequestError, invalid
from pagewire.json_files import read_json_object
from pagewire.limits import MAX_STOP_IDS, MAX_STOP_TOKEN_IDS
from pagewire.models import eos_token_ids
from pagewire.packing import Int32Array
from pagewire.sampling import SamplingParams
from pagewire.scheduler.text.byte_level import (
    byte_fallback_ids,
    byte_level_table,
    keeps_all_text,
)
from pagewire.scheduler.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    PrefixDetokenizer,
)
from pagewire.scheduler.text.request_templates import RequestTemplates
from pagewire.scheduler.text.template_files import load_chat_template, special_tokens
from pagewire.scheduler.text.token_texts import TokenTexts
from pagewire.tokenizer_conversion import converted_tokenizer

# The backend would encode a batch of one text in a pool of as many threads as there are cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A text with more characters for each token of the limit is likely to have too many tokens. If its
# beginning proves that, the rest is not encoded.
_CHARACTERS_A_TOKEN = 8
# Tokens that end at least this far before a cut are the same in the whole text. Closer to the cut,
# an added token or a run of white space may begin.
_UNCERTAIN_CHARACTERS = 512


NO_TOKENIZER = "this server has no tokenizer (--skip-tokenizer)"


@dataclass(frozen=True, slots=True)
class TextBounds:
    """Bounds that are checked before any work is done on a text; see the settings."""

    max_prompt_chars: int = SchedulerConfig.max_prompt_chars
    max_messages: int = SchedulerConfig.max_messages
    max_template_bytes: int = SchedulerConfig.max_template_bytes
    max_template_nodes: int = SchedulerConfig.max_template_nodes
    max_tools: int = SchedulerConfig.max_tools
    max_tool_bytes: int = SchedulerConfig.max_tool_bytes
    max_tool_nodes: int = SchedulerConfig.max_tool_nodes
    trust_request_chat_template: bool = SchedulerConfig.trust_request_chat_template


class TooManyTokensError(Exception):
    """A text has more than `limit` tokens."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit} tokens")
        self.limit = limit


class Tokenizer:
    """The tokenizer, chat template and defaults from a model folder."""

    def __init__(
        self,
        folder: Path,
        bounds: TextBounds = TextBounds(),
        template_file: Path | None = None,
        model: Path | None = None,
    ) -> None:
        """`template_file` has a chat template to use instead of the one in `folder`. `model` is the
        folder of the model's configuration, if that is another one.

        FileNotFoundError names the file that is missing, ValueError one that is not valid.
        """
        self.bounds = bounds
        self._backend = _read_backend(folder)
        self._backend.no_truncation()
        self._backend.no_padding()
        self.chat_template = load_chat_template(folder, template_file)
        self.request_templates = RequestTemplates(
            bounds.trust_request_chat_template, special_tokens(folder)
        )
        self.eos_token_ids = _eos_token_ids(model or folder)
        self.default_sampling = _default_sampling(model or folder)
        added = self._backend.get_added_tokens_decoder()
        # Whether a token may include the white space around it, however long that is.
        self._strips = any(token.lstrip or token.rstrip for token in added.values())
        # Ids from here on have no text; the model may have padded its vocabulary with some.
        self.vocab_size = max(self._backend.get_vocab_size(), 1 + max(added, default=0))
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._table = byte_level_table(self._backend, self._special_ids)
        self._fallback_ids = byte_fallback_ids(self._backend)
        self._all_bytes = self._bytes_in_texts()
        keeps_all = not self._strips and keeps_all_text(self._backend)
        self._keeps_all = bool(self._all_bytes) and keeps_all
        self._token_bytes: dict[int, bytes] = {}
        self.token_texts = TokenTexts(self._texts_in_table())

    def encode(
        self,
        text: str | tuple[str, str],
        add_special_tokens: bool = True,
        limit: int | None = None,
    ) -> Int32Array:
        """Token ids [n], at most `limit` if that is given. Two texts are joined as the tokenizer
        joins pairs.

        Raises TooManyTokensError, for a long text without encoding all of it, and RequestError for
        a text with too many characters. Takes about 0.2 us a character, without the interpreter's
        lock.
        """
        pair = None
        if isinstance(text, tuple):
            text, pair = text
        length = len(text) + len(pair or "")
        if length > self.bounds.max_prompt_chars:
            raise invalid(
                "prompt",
                f"the prompt has {length} characters and at most {self.bounds.max_prompt_chars} "
                "are taken (max_prompt_chars); shorten it",
            )
        for part in (text, pair or ""):
            if limit is not None and len(part) > _CHARACTERS_A_TOKEN * limit:
                self._refuse_if_long(part, limit)
        # Only the backend's batch encoding releases the interpreter's lock.
        batch = [text if pair is None else (text, pair)]
        [encoding] = self._backend.encode_batch_fast(batch, add_special_tokens=add_special_tokens)
        if limit is not None and len(encoding.ids) > limit:
            raise TooManyTokensError(limit)
        return np.array(encoding.ids, dtype=np.int32)

    def _refuse_if_long(self, text: str, limit: int) -> None:
        """Raises TooManyTokensError for a text of many characters that surely has more tokens."""
        if self._min_tokens(text) > limit:
            raise TooManyTokensError(limit)
        cut = _CHARACTERS_A_TOKEN * limit + _UNCERTAIN_CHARACTERS
        if self._certain_tokens(text[:cut]) > limit:
            raise TooManyTokensError(limit)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids at once."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_strs(self, ids: list[int]) -> list[str]:
        """The tokens as the vocabulary writes them; empty for ids that it does not have."""
        return [self._backend.id_to_token(token) or "" for token in ids]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token within a text; the name of a special token.

        Empty for ids that have no text.
        """
        known = self._token_bytes.get(token)
        if known is None:
            known = self._token_bytes[token] = self._bytes_of(token)
        return known

    def detokenizer(
        self, skip_special_tokens: bool = True, visible: Iterable[str] = ()
    ) -> Detokenizer:
        """A fresh incremental decoder, whose text has special tokens if it does not skip them, or
        if they are among the `visible` ones."""
        found = {self._backend.token_to_id(name): name for name in visible}
        names = {i: name for i, name in found.items() if i in self._special_ids}
        if not skip_special_tokens:
            names = self._special_names
        if self._table is not None:
            return ByteLevelDetokenizer(*self._table, names)
        hidden = self._special_ids - names.keys()
        return PrefixDetokenizer(self._backend, hidden, self._fallback_ids)

    def token_id(self, text: str) -> int | None:
        """The token that stands for a whole text; None if there is none."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    @cached_property
    def _special_names(self) -> dict[int, str]:
        return {i: self._backend.id_to_token(i) or "" for i in self._special_ids}

    def _texts_in_table(self) -> list[str | None]:
        """The texts for TokenTexts: special tokens have none, because requests may ask for them."""
        if self._table is None:
            return []
        texts = self._table[1].copy()
        for token in self._special_ids:
            texts[token] = None
        return texts

    def _min_tokens(self, text: str) -> int:
        """A lower bound: the bytes of the text, divided by those of its longest possible token.

        0 if the tokenizer may leave characters out.
        """
        if not self._keeps_all:
            return 0
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        there = set("".join(set(text)).encode())
        longest = max((len(data) for data in self._all_bytes if there.issuperset(data)), default=1)
        return len(text.encode()) // longest

    def _certain_tokens(self, beginning: str) -> int:
        """A lower bound on the tokens of a whole text, from its beginning.

        The text is cut into words from the left, and each is encoded on its own: the words before
        the last ones do not depend on what follows.
        """
        if self._strips:
            return 0
        encoding = self._backend.encode(beginning, add_special_tokens=False)
        end = len(beginning) - _UNCERTAIN_CHARACTERS
        last = next((w for w, (_, at) in _backwards(encoding) if at <= end), None)
        if last is None:
            return 0
        return sum(1 for word in encoding.word_ids if word is not None and word < last)

    def _bytes_in_texts(self) -> list[bytes]:
        """The bytes that each token stands for in a text, added tokens included."""
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
        # A decoder may strip the beginning of a text: take the second of two.
        alone = self.decode([token])
        return self.decode([token, token])[len(alone) :].encode()


class TokenIdsOnly:
    """Stands in for a Tokenizer where the model has none: refuses text, accepts token ids."""

    bounds = TextBounds()
    chat_template = None
    request_templates = RequestTemplates(False, {})
    token_texts = TokenTexts(())
    vocab_size = 0

    def __init__(self, folder: Path) -> None:
        self.eos_token_ids = _eos_token_ids(folder)
        self.default_sampling = _default_sampling(folder)

    def encode(
        self,
        text: str | tuple[str, str],
        add_special_tokens: bool = True,
        limit: int | None = None,
    ) -> Int32Array:
        """Raises RequestError."""
        raise invalid("prompt", f"{NO_TOKENIZER}; give the prompt as token ids")

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Raises RequestError."""
        raise invalid("token_ids", f"{NO_TOKENIZER}; token ids have no text here")

    def token_strs(self, ids: list[int]) -> list[str]:
        """Raises RequestError."""
        raise invalid("return_token_strs", "this server has no tokenizer; leave it out")

    def token_bytes(self, token: int) -> bytes:
        """Empty: no token has a text."""
        return b""

    def token_id(self, text: str) -> int | None:
        """None: no token has a text."""
        return None

    def detokenizer(
        self, skip_special_tokens: bool = True, visible: Iterable[str] = ()
    ) -> Detokenizer:
        """Raises RequestError."""
        raise invalid("detokenize", f"{NO_TOKENIZER}; set detokenize to false, or leave it out")


def _backwards(encoding: Any) -> Iterable[tuple[int | None, tuple[int, int]]]:
    """Word and offsets of each token, the last first."""
    return zip(reversed(encoding.word_ids), reversed(encoding.offsets), strict=True)


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return Backend.from_str(converted_tokenizer(folder))
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises no other class
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    """See `eos_token_ids`; ValueError if there are too many."""
    ids, limit = eos_token_ids(folder), MAX_STOP_IDS - MAX_STOP_TOKEN_IDS
    if len(ids) > limit:
        raise ValueError(
            f"{folder} has {len(ids)} end-of-sequence ids; at most {limit} are supported"
        )
    return ids


def _default_sampling(folder: Path) -> SamplingParams:
    """The parameters that generation_config.json recommends for requests that do not set them.

    ValueError names the file and a value that is not a number or out of range.
    """
    path = folder / "generation_config.json"
    config = read_json_object(path) if path.is_file() else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: config[name] for name in names if config.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{path}: {name} is {value!r}; it must be a number")
        if name == "top_k" and not isinstance(value, int):
            raise ValueError(f"{path}: {name} is {value!r}; it must be an integer")
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ValueError(f"{path}: {error.message}") from error
