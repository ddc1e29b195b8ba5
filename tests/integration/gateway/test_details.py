"""Token ids and token counts in answers: `return_token_ids`, `continuous_usage_stats`."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from support.scripted.in_process_gateway import in_process_gateway
from support.scripted.scripted_scheduler import (
    ScriptedScheduler,
    candidates_at,
    expected_text,
    prompt_ids,
    token_at,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SEED, COUNT = 5, 9
PROMPT = "one three five"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with in_process_gateway(ScriptedScheduler()) as client:
        yield client


def tokens(prompt: str, seed: int = SEED) -> list[int]:
    return [token_at(prompt, seed, index) for index in range(COUNT)]


async def post(client: httpx.AsyncClient, route: str, **fields: Any) -> httpx.Response:
    prompt: dict[str, Any] = {"prompt": PROMPT}
    if route == CHAT:
        prompt = {"messages": [{"role": "user", "content": PROMPT}]}
    body = {"max_tokens": COUNT, "seed": SEED, **prompt, **fields}
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def chunks(client: httpx.AsyncClient, route: str, **fields: Any) -> list[dict[str, Any]]:
    answer = await post(client, route, stream=True, **fields)
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_whole_answers_have_token_ids(client: httpx.AsyncClient) -> None:
    chat = (await post(client, CHAT, return_token_ids=True, n=2)).json()
    assert chat["prompt_token_ids"] == prompt_ids(PROMPT)
    assert [c["token_ids"] for c in chat["choices"]] == [tokens(PROMPT), tokens(PROMPT, SEED + 1)]
    assert chat["choices"][0]["message"]["content"] == expected_text(PROMPT, SEED, COUNT)
    prompts = [PROMPT, "seven"]
    answer = (await post(client, COMPLETION, prompt=prompts, return_token_ids=True)).json()
    assert "prompt_token_ids" not in answer
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        assert choice["token_ids"] == tokens(prompt, SEED)
        assert choice["prompt_token_ids"] == prompt_ids(prompt)
        assert choice["text"] == expected_text(prompt, SEED, COUNT)


@pytest.mark.parametrize("logprobs", [False, True])
async def test_chunks_of_chats_have_the_tokens_since_the_last_one(
    client: httpx.AsyncClient, logprobs: bool
) -> None:
    found = await chunks(client, CHAT, return_token_ids=True, logprobs=logprobs, n=2)
    openings = [each for each in found if each["choices"][0]["delta"].get("role")]
    assert len(openings) == 2
    assert all(each["prompt_token_ids"] == prompt_ids(PROMPT) for each in openings)
    assert sum("prompt_token_ids" in each for each in found) == 2
    for index in range(2):
        its_own = [e["choices"][0] for e in found if e["choices"][0]["index"] == index]
        given = [token for choice in its_own for token in choice.get("token_ids", [])]
        assert given == tokens(PROMPT, SEED + index)
        text = "".join(choice["delta"].get("content", "") for choice in its_own)
        assert text == expected_text(PROMPT, SEED + index, COUNT)
        assert sum(bool(choice["logprobs"]) for choice in its_own) > 0 or not logprobs


async def test_chunks_of_completions_have_the_prompt_in_the_first_one(
    client: httpx.AsyncClient,
) -> None:
    found = [e["choices"][0] for e in await chunks(client, COMPLETION, return_token_ids=True)]
    assert found[0]["prompt_token_ids"] == prompt_ids(PROMPT)
    assert not any("prompt_token_ids" in choice for choice in found[1:])
    assert [t for choice in found for t in choice["token_ids"]] == tokens(PROMPT)


@pytest.mark.parametrize("include_usage", [False, True])
async def test_every_chunk_has_the_token_counts_so_far(
    client: httpx.AsyncClient, include_usage: bool
) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    for route in (CHAT, COMPLETION):
        found = await chunks(client, route, stream_options=options)
        last = found.pop() if include_usage else found[-1]
        counts = [each["usage"]["completion_tokens"] for each in found]
        assert counts == sorted(counts)
        assert counts[0] >= 1
        assert counts[-1] == COUNT
        words = len(PROMPT.split())
        assert all(each["usage"]["prompt_tokens"] == words for each in found)
        assert found[-1]["usage"]["total_tokens"] == words + COUNT
        assert (last["choices"] == []) is include_usage
        assert last["usage"]["completion_tokens"] == COUNT


async def test_log_probabilities_name_tokens_by_their_ids(client: httpx.AsyncClient) -> None:
    fields = {"return_tokens_as_token_ids": True}
    want = [candidates_at(PROMPT, SEED, index, 2) for index in range(COUNT)]
    names = [[f"token_id:{token}" for token, _, _ in candidates] for candidates in want]
    answer = (await post(client, CHAT, logprobs=True, top_logprobs=2, **fields)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == [each[0] for each in names]
    assert [[t["token"] for t in e["top_logprobs"]] for e in content] == [n[1:] for n in names]
    assert content[0]["bytes"] == list(want[0][0][2])
    answer = (await post(client, COMPLETION, logprobs=2, **fields)).json()
    shown = answer["choices"][0]["logprobs"]
    assert shown["tokens"] == [each[0] for each in names]
    assert [set(each) for each in shown["top_logprobs"]] == [set(each) for each in names]
