"""The JSON lines of a program."""

import json

import pytest

from pagewire.worker.command.messages import (
    Generate,
    NonsenseError,
    Piece,
    Ready,
    cancel_line,
    read_piece,
    read_ready,
)


def line(**message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def test_a_first_line():
    assert read_ready(line(type="ready")) == Ready()
    given = line(
        type="ready", input="text", output="text", honours=["top_k", "seed"], max_sequences=4
    )
    assert read_ready(given) == Ready(True, True, frozenset({"top_k", "seed"}), 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"loading ...\n", "is not JSON"),
        (b"[1]\n", "is not a JSON object"),
        (b"[" * 100_000 + b"\n", "is not JSON"),
        (line(type="hello"), '"type": "ready"'),
        (line(type="ready", input="words"), "input is 'words'"),
        (line(type="ready", honours="top_k"), "honours must be"),
        (line(type="ready", max_sequences=0), "max_sequences is 0"),
        (line(type="ready", max_sequences=True), "max_sequences is True"),
        (line(type="ready", honors=[]), "unknown field 'honors'"),
    ],
)
def test_a_first_line_that_makes_no_sense(given, message):
    with pytest.raises(NonsenseError, match=message):
        read_ready(given)


def test_pieces():
    assert read_piece(line(id="1", token_ids=[5, 6])) == Piece("1", (5, 6))
    assert read_piece(line(id="1", text="a", finished=True)) == Piece("1", (), "a", True)
    assert read_piece(line(id="2", error="no")) == Piece("2", error="no")


@pytest.mark.parametrize(
    "given",
    [
        b"\xff\n",
        line(token_ids=[1]),
        line(id=1, token_ids=[1]),
        line(id="1", token_ids=5),
        line(id="1", token_ids=[-1]),
        line(id="1", token_ids=[1.0]),
        line(id="1", token_ids=[True]),
        line(id="1", token_ids=[2**31]),
        line(id="1", text=5),
        line(id="1", finished="yes"),
        line(id="1", error=5),
        line(id="1", token=5),
    ],
)
def test_a_piece_that_makes_no_sense(given):
    with pytest.raises(NonsenseError):
        read_piece(given)


def test_a_message_quotes_no_more_than_a_part():
    with pytest.raises(NonsenseError) as caught:
        read_piece(b"x" * 10_000)
    assert len(str(caught.value)) < 200


def test_lines_for_the_program():
    tokens = Generate("1", [1, 2], [3], 4, [9], {"top_k": 5})
    assert json.loads(tokens.line()) == {
        "type": "generate",
        "id": "1",
        "prompt_token_ids": [1, 2],
        "output_token_ids": [3],
        "max_tokens": 4,
        "stop_token_ids": [9],
        "sampling": {"top_k": 5},
    }
    texts = json.loads(Generate("2", "a\n", "", 4, [], {}).line())
    assert (texts["prompt"], texts["output"]) == ("a\n", "")
    assert Generate("2", "a\nb", "", 4, [], {}).line().count(b"\n") == 1
    assert json.loads(cancel_line("3")) == {"type": "cancel", "id": "3"}
