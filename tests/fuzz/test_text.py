"""Detokenizers and server-sent events, for random tokens and random pieces of text."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.gateway.answers.sse import ChunkWriter
from pagewire.gateway.api.chat import ChatFormatter
from pagewire.gateway.api.completions import CompletionFormatter
from pagewire.gateway.api.formatting import Envelope
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.models import EMBEDDED, resolve_model
from pagewire.packing import pack
from pagewire.scheduler.text.text_stream import TextStream
from pagewire.scheduler.text.tokenizer import Tokenizer
from pagewire.v1 import inference_pb2 as pb
from support.models.tokenizer_folders import byte_fallback_folder, byte_level_folder

Inputs = Callable[[str], int]
Tally = Callable[[str], Counter[str]]

# Includes characters that could break a stream of events.
TEXT = st.text(
    st.characters(codec="utf-8") | st.sampled_from("\r\n\x00\u2028\u0085🙂: "), max_size=12
)


def test_detokenizers(tmp_path: Path, inputs: Inputs, tally: Tally) -> None:
    """The pieces join to the text of all tokens, or to its beginning up to a stop string."""
    tokenizers = {
        "byte level": Tokenizer(byte_level_folder(tmp_path / "level")),
        "byte fallback": Tokenizer(byte_fallback_folder(tmp_path / "fallback")),
        "embedded": Tokenizer(resolve_model(EMBEDDED)),
    }
    for name, tokenizer in tokenizers.items():
        _fuzz_detokenizer(name, tokenizer, inputs("detokenizers") // 3, tally("detokenizers"))


def _fuzz_detokenizer(name: str, tokenizer: Tokenizer, count: int, counts: Counter[str]) -> None:
    ids = st.integers(0, tokenizer._backend.get_vocab_size() - 1)
    stops = st.lists(st.text("aeiou .\ufffd", min_size=1, max_size=3), max_size=3).map(tuple)

    @settings(max_examples=max(1, count), deadline=None, database=None, derandomize=False)
    @given(tokens=st.lists(ids, max_size=40), stop=stops, include=st.booleans())
    def check(tokens: list[int], stop: tuple[str, ...], include: bool) -> None:
        counts[name] += 1
        whole = tokenizer.decode(tokens)
        stream = TextStream(tokenizer.detokenizer(), stop, include)
        text = ""
        for token in tokens:
            text += stream.feed(token)
            if stream.stop_string is not None:
                break
        text += stream.flush()
        assert whole.startswith(text)
        if stream.stop_string is None:
            assert text == whole
            assert not any(string in text for string in stop)
        else:
            kept = text if include else text + stream.stop_string
            assert whole.startswith(kept)
            assert kept.endswith(stream.stop_string)

    check()


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_server_sent_events(kind: str, inputs: Inputs, tally: Tally) -> None:
    """A parser gets the whole text, with any pieces and any delay of reads."""
    counts = tally("server-sent events")
    pieces = st.lists(st.tuples(st.integers(0, 2), TEXT, st.booleans()), max_size=12)

    @settings(
        max_examples=max(1, inputs("server-sent events") // 2),
        deadline=None,
        database=None,
        derandomize=False,
    )
    @given(pieces=pieces, usage=st.booleans(), stop=st.none() | TEXT)
    def check(pieces: list[tuple[int, str, bool]], usage: bool, stop: str | None) -> None:
        counts[kind] += 1
        envelope = Envelope("x", "chunk", "m\n\n")
        formatter = ChatFormatter(envelope) if kind == "chat" else CompletionFormatter(envelope)
        runs = [Generation(pb.GenerateRequest(), i, i, UpdateQueue(), eager=True) for i in range(3)]
        writer, written = ChunkWriter(formatter, usage), ""
        for index, text, read in pieces:
            runs[index].extend(pack([1]), text.encode(), 0.0)
            if read:
                written += writer.write(runs[index])
        for run in runs:
            finish = pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string=stop)
            run.end(finish)
            written += writer.write(run)
        written += writer.closing(runs)
        got, ends = ["", "", ""], [0, 0, 0]
        for data in _parse(written):
            for choice in json.loads(data)["choices"]:
                delta = choice["delta"].get("content", "") if kind == "chat" else choice["text"]
                got[choice["index"]] += delta
                if choice["finish_reason"] is not None:
                    ends[choice["index"]] += 1
                    assert choice["stop_reason"] == stop
                assert ends[choice["index"]] <= 1
        assert got == ["".join(t for i, t, _ in pieces if i == index) for index in range(3)]
        assert ends == [1, 1, 1]

    check()


def _parse(stream: str) -> list[str]:
    """The data of a stream's events by the rules of the HTML standard, without [DONE]."""
    events, data = [], []
    for line in stream.encode().replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if not line and data:
            events.append(b"\n".join(data).decode())
            data = []
        elif line:
            field, _, value = line.partition(b":")
            assert field == b"data"
            data.append(value.removeprefix(b" "))
    assert not data
    assert events.pop() == "[DONE]"
    return events
