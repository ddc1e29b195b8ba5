"""The chunks of a streamed answer."""

import json
from typing import Any

import pytest

from pagewire.gateway.answers.sse import DONE, ChunkWriter, EventStream
from pagewire.gateway.api.chat import ChatFormatter
from pagewire.gateway.api.completions import CompletionFormatter
from pagewire.gateway.api.formatting import Envelope, Formatter
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.packing import pack
from pagewire.v1 import inference_pb2 as pb

HARD_TO_ESCAPE = 'quote " backslash \\ newline \n nul \x00 line\u2028separator 🙂 </script>'


def generation(index: int = 0) -> Generation:
    return Generation(pb.GenerateRequest(), index, index, UpdateQueue(), eager=True)


def finish(**fields: Any) -> pb.Finish:
    usage = pb.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    return pb.Finish(reason=pb.FINISH_REASON_STOP, usage=usage, **fields)


def events(text: str) -> list[dict[str, Any]]:
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def completion_formatter() -> Formatter:
    return CompletionFormatter(Envelope("cmpl", "text_completion", "m"))


def chat_formatter(*stop_token_ids: int) -> Formatter:
    envelope = Envelope("chatcmpl", "chat.completion.chunk", "m")
    return ChatFormatter(envelope, stop_token_ids=frozenset(stop_token_ids))


def test_completion_chunks() -> None:
    writer = ChunkWriter(completion_formatter(), include_usage=False)
    run = generation(index=2)
    run.extend(pack([1]), HARD_TO_ESCAPE.encode(), 0.0)
    (chunk,) = events(writer.write(run))
    assert set(chunk) == {"id", "object", "created", "model", "choices"}
    assert chunk["choices"] == [
        {"index": 2, "text": HARD_TO_ESCAPE, "logprobs": None, "finish_reason": None}
    ]
    run.extend(pack([2]), b"", 0.0)
    assert writer.write(run) == "", "no text, no chunk"
    run.end(finish(stop_string="END"))
    (last,) = events(writer.write(run))
    assert last["choices"] == [
        {"index": 2, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}
    ]
    assert last["id"] == chunk["id"]


def test_chat_chunks_with_usage() -> None:
    writer = ChunkWriter(chat_formatter(7), include_usage=True)
    run = generation()
    run.extend(pack([1]), HARD_TO_ESCAPE.encode(), 0.0)
    role, text = events(writer.write(run))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"] == {"content": HARD_TO_ESCAPE}
    assert (role["usage"], text["usage"]) == (None, None)
    run.end(finish(stop_token_id=7))
    (last,) = events(writer.write(run))
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["stop_reason"] == 7
    (counts,) = events(writer.closing([run]).removesuffix(DONE))
    assert counts["choices"] == []
    assert counts["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_usage_has_the_tokens_of_predictions_of_all_choices() -> None:
    runs = []
    for index in range(2):
        run = generation(index=index)
        ended = finish()
        ended.usage.accepted_prediction_tokens = 5 * index
        ended.usage.rejected_prediction_tokens = 2
        run.end(ended)
        runs.append(run)
    (counts,) = events(ChunkWriter(chat_formatter(), True).closing(runs).removesuffix(DONE))
    assert counts["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 4,
    }


@pytest.mark.parametrize("formatter", [completion_formatter(), chat_formatter()])
def test_end_without_text(formatter: Formatter) -> None:
    run = generation()
    run.end(finish())
    chunks = events(ChunkWriter(formatter, False).write(run))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(chunks) == (2 if isinstance(formatter, ChatFormatter) else 1)


async def test_a_client_that_leaves_before_the_stream_begins_ends_the_run() -> None:
    class Closable:
        closed = 0
        generations: tuple[Generation, ...] = ()

        def close(self) -> None:
            self.closed += 1

    async def send(message: Any) -> None:
        raise ConnectionResetError

    run: Any = Closable()
    stream = EventStream(run, [], ChunkWriter(chat_formatter(), include_usage=False))
    with pytest.raises(ConnectionResetError):
        await stream({"type": "http", "state": {}}, send, send)
    assert run.closed == 1
