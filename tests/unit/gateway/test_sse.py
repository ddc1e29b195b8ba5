"""The chunks of a stream, and how a lagging reader gets fewer of them."""

import json
from typing import Any

import pytest

from pagewire.errors import Code
from pagewire.gateway.api.chat import ChatFormatter
from pagewire.gateway.api.completions import CompletionFormatter
from pagewire.gateway.api.formatting import Envelope, Formatter
from pagewire.gateway.errors import ClientGoneError
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.gateway.http.sse import ChunkWriter, EventStream
from pagewire.packing import pack
from pagewire.v1 import inference_pb2 as pb

AWKWARD = 'quote " backslash \\ newline \n nul \x00 line\u2028separator 🙂 </script>'


def generation(updates: UpdateQueue | None = None, index: int = 0) -> Generation:
    return Generation(pb.GenerateRequest(), index, index, updates or UpdateQueue(), eager=True)


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


def chat_formatter() -> Formatter:
    return ChatFormatter(Envelope("chatcmpl", "chat.completion.chunk", "m"))


def test_completion_chunks() -> None:
    writer = ChunkWriter(completion_formatter(), include_usage=False)
    run = generation(index=2)
    run.extend(pack([1]), AWKWARD.encode(), 0.0)
    (chunk,) = events(writer.write(run))
    assert set(chunk) == {"id", "object", "created", "model", "choices"}
    assert chunk["choices"] == [
        {"index": 2, "text": AWKWARD, "logprobs": None, "finish_reason": None}
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
    writer = ChunkWriter(chat_formatter(), include_usage=True)
    run = generation()
    run.extend(pack([1]), AWKWARD.encode(), 0.0)
    role, text = events(writer.write(run))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"] == {"content": AWKWARD}
    assert (role["usage"], text["usage"]) == (None, None)
    run.end(finish(stop_token_id=7))
    (last,) = events(writer.write(run))
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["stop_reason"] == 7
    (counts,) = events(writer.usage([run]))
    assert counts["choices"] == []
    assert counts["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize("formatter", [completion_formatter(), chat_formatter()])
def test_end_without_text(formatter: Formatter) -> None:
    run = generation()
    run.end(finish())
    chunks = events(ChunkWriter(formatter, False).write(run))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(chunks) == (2 if isinstance(formatter, ChatFormatter) else 1)


async def test_deltas_merge_for_a_reader_that_lags() -> None:
    updates = UpdateQueue()
    run = generation(updates)
    for index in range(100):
        run.extend(pack([index]), "é".encode(), 0.0)
    assert await updates.take() == [run]
    assert run.take_text() == "é" * 100
    assert run.tokens.tolist() == list(range(100))
    run.extend(pack([100]), b"x", 0.0)
    assert await updates.take() == [run]


async def test_hanging_up_wakes_the_reader() -> None:
    updates = UpdateQueue()
    updates.client_left()
    with pytest.raises(ClientGoneError):
        await updates.take()


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (pb.Finish(reason=pb.FINISH_REASON_ERROR, error=pb.Error(code=8, message="full")), 8),
        (pb.Finish(reason=pb.FINISH_REASON_ERROR, error=pb.Error(code=99)), Code.INTERNAL),
        (pb.Finish(), Code.INTERNAL),
    ],
)
async def test_bad_ends(ending: pb.Finish, code: int) -> None:
    run = generation()
    run.end(ending)
    assert run.failure is not None
    assert run.failure.code == code
    assert await run.updates.take() == [run]


async def test_a_stream_whose_client_is_gone_as_it_begins_ends_its_run() -> None:
    class Closable:
        closed = 0
        generations: tuple[Generation, ...] = ()

        def close(self) -> None:
            self.closed += 1

    async def send(message: Any) -> None:
        raise ConnectionResetError

    run: Any = Closable()
    stream = EventStream(run, [], chat_formatter(), include_usage=False)
    with pytest.raises(ConnectionResetError):
        await stream({"type": "http", "state": {}}, send, send)
    assert run.closed == 1
