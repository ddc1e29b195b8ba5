"""Log probabilities as OpenAI's client reads them."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from pagewire.gateway.api.formatting import MIN_LOGPROB
from support.scripted.in_process_gateway import in_process_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler, candidates_at, expected_text

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEED, COUNT = 11, 12


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def peer() -> ScriptedScheduler:
    return ScriptedScheduler()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(peer: ScriptedScheduler) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process_gateway(peer) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://gateway/v1", api_key="x", max_retries=0, http_client=http
    )


def scripted(prompt: str, top: int) -> list[list[tuple[int, float, bytes]]]:
    return [candidates_at(prompt, SEED, index, top) for index in range(COUNT)]


def as_json(value: float) -> float:
    return max(value, MIN_LOGPROB)


async def chat(client: openai.AsyncOpenAI, prompt: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": prompt}]
    return await client.chat.completions.create(
        model="scripted", messages=messages, max_tokens=COUNT, seed=SEED, **fields
    )


async def complete(client: openai.AsyncOpenAI, prompt: Any, **fields: Any) -> Any:
    return await client.completions.create(
        model="scripted", prompt=prompt, max_tokens=COUNT, seed=SEED, **fields
    )


def check_chat(content: list[Any], prompt: str, top: int) -> None:
    want = scripted(prompt, top)
    assert len(content) == COUNT
    for entry, (chosen, *others) in zip(content, want, strict=True):
        for got, (_, value, data) in zip(
            [entry, *entry.top_logprobs], [chosen, *others], strict=True
        ):
            assert bytes(got.bytes) == data
            assert got.token == data.decode(errors="replace")
            assert got.logprob == as_json(value)


@pytest.mark.parametrize("top", [None, 0, 3, 20])
async def test_chat_has_log_probabilities(client: openai.AsyncOpenAI, top: int | None) -> None:
    fields = {"logprobs": True} | ({} if top is None else {"top_logprobs": top})
    (choice,) = (await chat(client, "hello", **fields)).choices
    assert choice.message.content == expected_text("hello", SEED, COUNT)
    check_chat(choice.logprobs.content, "hello", top or 0)
    assert choice.logprobs.refusal is None


async def test_a_chat_stream_has_the_same(client: openai.AsyncOpenAI) -> None:
    chunks = [
        chunk
        async for chunk in await chat(client, "hello", logprobs=True, top_logprobs=2, stream=True)
    ]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected_text("hello", SEED, COUNT)
    pieces = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert len(pieces) > 2
    check_chat([entry for piece in pieces for entry in piece], "hello", 2)


async def test_they_are_null_unless_requested(client: openai.AsyncOpenAI) -> None:
    (choice,) = (await chat(client, "hello")).choices
    assert choice.logprobs is None
    chunks = [chunk async for chunk in await chat(client, "hello", stream=True)]
    assert all(chunk.choices[0].logprobs is None for chunk in chunks)


def check_completion(logprobs: Any, prompt: str, top: int) -> None:
    want = scripted(prompt, top)
    texts = [[data.decode(errors="replace") for _, _, data in row] for row in want]
    assert logprobs.tokens == [row[0] for row in texts]
    assert logprobs.token_logprobs == [row[0][1] for row in want]
    for got, row, its_texts in zip(logprobs.top_logprobs, want, texts, strict=True):
        pairs = zip(its_texts[1:] + its_texts[:1], row[1:] + row[:1], strict=True)
        assert list(got.items()) == [(text, as_json(value)) for text, (_, value, _) in pairs]
    text = expected_text(prompt, SEED, COUNT)
    for index, (token, offset) in enumerate(
        zip(logprobs.tokens, logprobs.text_offset, strict=True)
    ):
        whole = index % 5 not in (3, 4)
        assert text[offset:].startswith(token if whole else "🙂")


@pytest.mark.parametrize("top", [0, 1, 5])
async def test_completions_have_log_probabilities(client: openai.AsyncOpenAI, top: int) -> None:
    answer = await complete(client, ["one", "two"], logprobs=top)
    for choice, prompt in zip(answer.choices, ["one", "two"], strict=True):
        check_completion(choice.logprobs, prompt, top)


async def test_a_completion_stream_has_the_same(client: openai.AsyncOpenAI) -> None:
    whole = (await complete(client, "one", logprobs=2)).choices[0].logprobs.model_dump()
    streamed: dict[str, list[Any]] = {name: [] for name in whole}
    async for chunk in await complete(client, "one", logprobs=2, stream=True):
        if chunk.choices[0].logprobs:
            for name, values in chunk.choices[0].logprobs.model_dump().items():
                streamed[name] += values
    assert streamed == whole


async def test_a_repeated_delta_is_dropped(client: openai.AsyncOpenAI) -> None:
    answer = await complete(client, "twice=4", logprobs=1)
    check_completion(answer.choices[0].logprobs, "twice=4", 1)


async def test_missing_log_probabilities_are_an_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="no log probabilities"):
        await complete(client, "mute=5", logprobs=1)
    assert (await complete(client, "mute=5")).choices[0].logprobs is None


async def test_the_scheduler_is_asked_only_if_needed(
    client: openai.AsyncOpenAI, peer: ScriptedScheduler
) -> None:
    peer.submitted.clear()
    await complete(client, "a", logprobs=0)
    await complete(client, "a")
    await chat(client, "a", logprobs=True)
    await chat(client, "a", logprobs=False)
    asked = [r.logprobs if r.HasField("logprobs") else None for r in peer.submitted]
    assert asked == [0, None, 0, None]
