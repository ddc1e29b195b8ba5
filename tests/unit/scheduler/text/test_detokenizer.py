"""Incremental detokenization: the pieces are the text of all tokens."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.scheduler.text.detokenizer import ByteLevelDetokenizer, PrefixDetokenizer
from pagewire.scheduler.text.token_texts import PARTIAL
from pagewire.scheduler.text.tokenizer import (
    Tokenizer,
)
from support.models.tokenizer_folders import (
    CORPUS,
)


def test_each_kind_has_its_detokenizer(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert isinstance(byte_level.detokenizer(), ByteLevelDetokenizer)
    assert isinstance(byte_fallback.detokenizer(), PrefixDetokenizer)


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_pieces_are_the_full_text_for_any_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer._backend.get_vocab_size() - 1), max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(pieces_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("text", CORPUS)
def test_a_character_is_never_split(tokenizer: Tokenizer, text: str) -> None:
    pieces = pieces_of(tokenizer, tokenizer.encode(text).tolist())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_ids_without_a_token_do_not_lengthen_the_window(byte_fallback: Tokenizer) -> None:
    """A model may have more ids than its tokenizer; many in a row must not take longer each."""
    decoded: list[int] = []
    backend = byte_fallback._backend

    class Counting:
        id_to_token = staticmethod(backend.id_to_token)

        def decode(self, ids: list[int], skip_special_tokens: bool) -> Any:
            decoded.append(len(ids))
            return backend.decode(ids, skip_special_tokens=skip_special_tokens)

    detokenizer = PrefixDetokenizer(Counting(), frozenset(), frozenset())  # type: ignore[arg-type]
    hello = backend.token_to_id("▁hello")
    ids = [hello, *[byte_fallback._backend.get_vocab_size() + 5] * 1000, hello]
    text = "".join([*map(detokenizer.feed, ids), detokenizer.flush()])
    assert text == byte_fallback.decode(ids) == "hello hello"
    assert max(decoded) <= 2


def test_special_tokens_have_no_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|start|>hi<|end|>").tolist()
    assert "".join(pieces_of(byte_level, ids)) == "hi"
    assert "".join(pieces_of(byte_level, ids, skip=False)) == "<|start|>hi<|end|>"
    start = np.array(ids[:1], np.int32)
    assert byte_level.token_texts.lookup(start)[1].tolist() == [PARTIAL], "each request decides"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_request_may_ask_for_some_special_tokens(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    special = sorted(tokenizer._special_names.items())
    (shown, name), (hidden, _) = special[0], special[-1]
    (word,) = tokenizer.encode("hello", add_special_tokens=False).tolist()[:1]
    detokenizer = tokenizer.detokenizer(visible=[name, "no token at all"])
    ids = [word, shown, hidden, word, shown]
    text = "".join([*map(detokenizer.feed, ids), detokenizer.flush()])
    hello = tokenizer.decode([word])
    assert text.replace(" ", "") == f"{hello}{name}{hello}{name}"
