"""Inputs that the chat template of a served model does not render, over HTTP."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from support.processes.fleet import Fleet
from support.processes.gateway_process import ready_gateway
from support.scripted.asked_text import ask
from support.scripted.text_worker import text_fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEADER = "x-pagewire-ignored"
# Knows only users and the assistant.
TEMPLATE = """\
{%- for m in messages %}{% if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}<|im_start|>assistant
{% if enable_thinking %}<think>{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": ask("Yes.")}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
AGENT = [
    {"role": "user", "content": "hi", "name": "Ada"},
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    USER,
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def plain_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    flags = ("--tool-parser=hermes",)
    folder = tmp_path_factory.mktemp("plain")
    async with text_fleet(folder, TEMPLATE, scheduler_flags=flags) as started:
        yield started


async def post(url: str, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return await client.post(path, json={"model": "text", **body})


CASES: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": [USER]}, None),
    ({"messages": [USER], "tools": TOOLS}, "tools"),
    ({"messages": [USER], "tools": TOOLS, "tool_choice": "none"}, None),
    (
        {"messages": AGENT},
        "messages[role=tool], messages[].name, messages[].tool_calls, messages[].reasoning_content",
    ),
    (
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "depth": 3}},
        "chat_template_kwargs.depth",
    ),
    ({"messages": [USER], "mood": 1, "reasoning_effort": "low"}, "mood, reasoning_effort"),
]


@pytest.mark.parametrize(("body", "header"), CASES)
async def test_answers_name_what_the_template_leaves_out(
    plain_fleet: Fleet, body: dict[str, Any], header: str | None
) -> None:
    url = plain_fleet.urls[0]
    for stream in (False, True):
        answer = await post(url, **body, stream=stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get(HEADER) == header
        assert "Yes." in answer.text or stream


async def test_the_named_inputs_do_not_change_the_prompt(plain_fleet: Fleet) -> None:
    url = plain_fleet.urls[0]
    bare = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}, USER]
    given = await post(url, "/tokenize", messages=AGENT, tools=TOOLS)
    without = await post(url, "/tokenize", messages=bare)
    assert given.json()["tokens"] == without.json()["tokens"]
    assert given.headers[HEADER].startswith("tools, messages[role=tool], ")
    assert HEADER not in without.headers


async def test_a_strict_gateway_refuses_them(plain_fleet: Fleet) -> None:
    async with ready_gateway(plain_fleet.schedulers[0], strict_fields=True) as gateway:
        for body, header in CASES[:-1]:
            answer = await post(gateway.url, **body)
            assert answer.status_code == (200 if header is None else 400), answer.text
            if header is not None:
                error = answer.json()["error"]
                assert error["param"] == header.partition(",")[0]
                assert "is not rendered by this model's chat template" in error["message"]
                assert "--chat-template" in error["message"]
