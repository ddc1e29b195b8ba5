"""The load of one process: prompts, and the times of chunks."""

import asyncio
import json
import random

import pytest

from pagewire.bench.http_load import Timing, _time_chunks, words


def test_chunks_without_text_are_not_timed_and_usage_counts_tokens() -> None:
    events = [
        {"choices": [{"text": ""}]},
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}},
    ]

    async def lines():  # type: ignore[no-untyped-def]
        for event in events:
            yield b"data: " + json.dumps(event).encode() + b"\n"
            yield b"\n"
        yield b"data: [DONE]\n"

    seen = Timing(0.0)
    asyncio.run(_time_chunks(lines(), seen))
    assert (seen.prompt_tokens, seen.output_tokens, len(seen.itls)) == (3, 7, 1)
    assert seen.e2e == pytest.approx(seen.ttft + seen.itls[0])


def test_prompts_differ_by_seed_and_repeat_with_it() -> None:
    assert words(random.Random(1), 5) == words(random.Random(1), 5)
    assert words(random.Random(1), 5) != words(random.Random(2), 5)
