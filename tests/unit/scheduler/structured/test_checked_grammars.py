"""Grammars are compiled once, in helper processes; slow compilations are refused."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pagewire.config import SchedulerConfig
from pagewire.errors import Code, RequestError
from pagewire.helpers.pool import TaskError
from pagewire.scheduler.structured.checked_grammars import CheckedGrammars
from pagewire.v1 import inference_pb2 as pb
from support.hostile_grammars import TAKES_LONG

INTEGER = pb.StructuredOutput(json_schema=json.dumps({"type": "integer"}))


@pytest_asyncio.fixture
async def grammars() -> AsyncIterator[CheckedGrammars]:
    # Long enough for a busy machine, and far below the time of the slow grammar.
    made = CheckedGrammars(SchedulerConfig(model="embedded", max_grammar_seconds=3.0))
    yield made
    await made.close()


async def refusal(grammars: CheckedGrammars, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        await grammars.grammar(pb.StructuredOutput(**fields))
    return refused.value


async def test_a_grammar_is_compiled_once(
    grammars: CheckedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = []
    run = grammars._pool.run

    async def count(task: bytes, large: bool = False) -> bytes:
        tasks.append(task)
        return await run(task, large=large)

    monkeypatch.setattr(grammars._pool, "run", count)
    later = pb.StructuredOutput()
    later.CopyFrom(INTEGER)
    later.begin_after = "</think>"  # no part of the grammar
    found = await asyncio.gather(*(grammars.grammar(each) for each in (INTEGER, INTEGER, later)))
    assert len(set(found)) == 1
    assert await grammars.grammar(INTEGER) == found[0]
    for _ in range(2):
        error = await refusal(grammars, json_schema='{"uniqueItems": true}')
        assert error.code is Code.INVALID_ARGUMENT
        assert error.field == "structured_output.json_schema"
    assert len(tasks) == 2


async def test_what_takes_too_long_is_refused_and_others_go_on(grammars: CheckedGrammars) -> None:
    await grammars.grammar(INTEGER)
    began = time.monotonic()
    slow = asyncio.create_task(refusal(grammars, **TAKES_LONG))
    await grammars.grammar(pb.StructuredOutput(regex="a+"))
    assert not slow.done()
    error = await slow
    assert error.code is Code.INVALID_ARGUMENT
    assert "max_grammar_seconds" in error.message
    assert time.monotonic() - began < 60
    assert await grammars.grammar(pb.StructuredOutput(regex="b+"))


async def test_a_grammar_that_took_too_long_once_may_compile_the_next_time(
    grammars: CheckedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = grammars._pool.run

    async def late(task: bytes, large: bool = False) -> bytes:
        raise TaskError("it took too long")

    monkeypatch.setattr(grammars._pool, "run", late)
    with pytest.raises(RequestError, match="took too long"):
        await grammars.grammar(INTEGER)
    monkeypatch.setattr(grammars._pool, "run", run)
    assert await grammars.grammar(INTEGER)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "empty"),
        ({"json_object": False}, "empty or false"),
        ({"regex": ""}, "empty"),
        ({"choice": pb.Choices()}, "empty"),
        ({"choice": pb.Choices(values=["a", ""])}, "empty text"),
        ({"regex": "a" * 70_000}, "65536"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"regex": "a", "begin_after": "x" * 2000}, "begin_after"),
    ],
)
async def test_malformed_outputs_need_no_helper(fields: dict[str, Any], words: str) -> None:
    grammars = CheckedGrammars(SchedulerConfig(model="embedded"))
    assert words in (await refusal(grammars, **fields)).message
