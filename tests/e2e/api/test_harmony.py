"""The channels of gpt-oss with OpenAI's client against real processes."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from support.processes.fleet import Fleet
from support.scripted.asked_text import ask
from support.scripted.text_worker import HARMONY_SPECIAL, HARMONY_TEMPLATE, text_fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather"}}]
ARGUMENTS = '{"city": "Köln 🙂 \\"}\\"", "days": [1, {"x": 2}]}'
ANSWER = (
    "<|channel|>analysis<|message|>Is it\nwarm? I look.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is 1 < 2."
)
CALL = (
    "<|channel|>analysis<|message|>Is it warm?<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def harmony_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("harmony")
    async with text_fleet(folder, HARMONY_TEMPLATE, HARMONY_SPECIAL) as started:
        yield started


@pytest.fixture
def chats(harmony_fleet: Fleet) -> Any:
    url = f"{harmony_fleet.urls[0]}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0).chat.completions


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "text", "messages": [{"role": "user", "content": ask(text)}], **fields}


async def test_reasoning_and_answer(chats: Any) -> None:
    answer = await chats.create(**said(ANSWER))
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("It is 1 < 2.", "Is it\nwarm? I look.")
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    assert answer.choices[0].finish_reason == "stop"


async def test_the_deltas_of_a_call(chats: Any) -> None:
    whole = (await chats.create(**said(CALL, tools=TOOLS))).choices[0]
    [made] = whole.message.tool_calls
    assert (made.function.name, made.function.arguments) == ("weather", ARGUMENTS)
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I look.")
    assert whole.message.reasoning_content == "Is it warm?"

    content = reasoning = arguments = ""
    async for chunk in await chats.create(**said(CALL, tools=TOOLS), stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for part in delta.tool_calls or ():
            arguments += part.function.arguments
    assert (content, reasoning, arguments) == ("I look.", "Is it warm?", ARGUMENTS)


async def test_a_call_and_its_reasoning_go_back_to_the_model(
    chats: Any, harmony_fleet: Fleet
) -> None:
    message = (
        (await chats.create(**said(CALL.replace("I look.", ""), tools=TOOLS))).choices[0].message
    )
    assistant = message.model_dump(include={"role", "content", "tool_calls", "reasoning_content"})
    turns = [
        {"role": "user", "content": "Is it warm?"},
        assistant,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "20 C"},
    ]
    async with httpx.AsyncClient(base_url=harmony_fleet.urls[0]) as client:
        body = {"model": "text", "messages": turns, "tools": TOOLS}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        body = {"model": "text", "tokens": tokens}
        prompt = (await client.post("/detokenize", json=body)).json()["prompt"]
    assert "<|channel|>analysis<|message|>Is it warm?<|end|>" in prompt
    arguments = json.dumps(json.loads(ARGUMENTS), ensure_ascii=False)
    assert f"to=functions.weather<|channel|>commentary json<|message|>{arguments}<|call|>" in prompt
