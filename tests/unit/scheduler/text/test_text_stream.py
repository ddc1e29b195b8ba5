"""Stop strings in the text of a running sequence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.scheduler.text.text_stream import TextStream
from pagewire.scheduler.text.tokenizer import (
    Tokenizer,
)


def stream(tokenizer: Tokenizer, stop: tuple[str, ...], include: bool = False) -> TextStream:
    return TextStream(tokenizer.detokenizer(), stop, include)


def run_until_stop(text_stream: TextStream, ids: list[int]) -> list[str]:
    pieces = []
    for token in ids:
        pieces.append(text_stream.feed(token))
        if text_stream.stop_string is not None:
            return pieces
    return [*pieces, text_stream.flush()]


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abcé🙂", max_size=30),
    stop=st.lists(st.text(alphabet="abcé🙂", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_end_the_text_where_the_first_is_complete(
    byte_level: Tokenizer, text: str, stop: list[str], include: bool
) -> None:
    text_stream = stream(byte_level, tuple(stop), include)
    pieces = run_until_stop(text_stream, byte_level.encode(text).tolist())
    ends = [at + len(s) for s in stop if (at := text.find(s)) >= 0]
    if not ends:
        assert text_stream.stop_string is None
        assert "".join(pieces) == text
        return
    found = text_stream.stop_string
    assert found in stop
    got = "".join(pieces)
    kept = got if include else got + found
    assert text.startswith(kept)
    assert kept.endswith(found)
    assert not any(s in kept[: len(kept) - len(found)] for s in stop)


class Pieces:
    """A detokenizer in which token n has the nth piece as its text; the flush returns `rest`."""

    at_character = True

    def __init__(self, *pieces: str, rest: str = "") -> None:
        self._pieces = pieces
        self._rest = rest

    def feed(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return self._rest


@pytest.mark.parametrize("stop", [("bcde", "cd"), ("cd", "bcde")])
def test_of_stop_strings_within_one_token_the_first_complete_one_wins(
    stop: tuple[str, ...],
) -> None:
    """`bcde` begins earlier, but `cd` is complete earlier."""
    text_stream = TextStream(Pieces("abcdef"), stop, include_stop=False)
    assert text_stream.feed(0) == "ab"
    assert text_stream.stop_string == "cd"


@pytest.mark.parametrize("stop", [("bcd", "d"), ("d", "bcd")])
def test_of_stop_strings_complete_at_one_place_the_earlier_begun_wins(
    stop: tuple[str, ...],
) -> None:
    text_stream = TextStream(Pieces("abcdef"), stop, include_stop=False)
    assert text_stream.feed(0) == "a"
    assert text_stream.stop_string == "bcd"


@pytest.mark.parametrize(
    ("min_tokens", "sent", "found"),
    [
        (0, ["x"], "ab"),
        (1, ["xa", "", ""], "bcd"),  # "ab" is complete too early; "bcd" only begins there
        (2, ["xa", "", ""], "bcd"),
        (3, ["xa", "", "bcd", ""], "ab"),
        (4, ["xa", "", "bcd", "a", "by", ""], None),
    ],
)
def test_a_stop_string_among_the_first_tokens_is_text(
    min_tokens: int, sent: list[str], found: str | None
) -> None:
    text_stream = TextStream(Pieces("xab", "c", "d", "ab", "y"), ("ab", "bcd"), False, min_tokens)
    assert run_until_stop(text_stream, list(range(5))) == sent
    assert text_stream.stop_string == found


def test_a_stop_string_that_the_flush_completes_among_the_first_tokens_is_text() -> None:
    text_stream = TextStream(Pieces("a", rest="b"), ("b",), False, 1)
    assert text_stream.feed(0) + text_stream.flush() == "ab"
    assert text_stream.stop_string is None


@pytest.mark.parametrize(("include", "rest"), [(False, "x"), (True, "x end")])
def test_a_stop_string_that_only_the_flush_completes(include: bool, rest: str) -> None:
    text_stream = TextStream(Pieces("some x", " e", rest="nd of it"), (" end",), include)
    assert text_stream.feed(0) + text_stream.feed(1) == "some x"
    assert text_stream.flush() == rest.removeprefix("x")
    assert text_stream.stop_string == " end"
    assert text_stream.flush() == ""


def test_text_that_may_begin_a_stop_string_is_held_back(byte_fallback: Tokenizer) -> None:
    text_stream = stream(byte_fallback, ("abba",))
    ids = [byte_fallback.encode(c).tolist()[-1] for c in "eabbe"]
    assert [text_stream.feed(token) for token in ids] == ["e", "", "", "", "abbe"]


def test_a_resumed_text_continues_where_the_first_run_was(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a🙂b stop here").tolist()
    first = stream(byte_level, ("op x",))
    pieces = [first.feed(token) for token in ids]
    rest = first.flush()
    assert "".join(pieces) + rest == "a🙂b stop here"
    for cut in range(len(ids) + 1):
        resumed = stream(byte_level, ("op x",))
        for token in ids[:cut]:
            resumed.feed(token)
        assert [resumed.feed(token) for token in ids[cut:]] == pieces[cut:]
        assert resumed.flush() == rest
