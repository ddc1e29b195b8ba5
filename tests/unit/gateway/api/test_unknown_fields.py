"""Fields that no model declares: ignored and named, or refused."""

import json
from typing import Any

import httpx
import pytest

from pagewire.errors import RequestError
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsing.job_parser import JobParser, Route
from support.scripted.in_process_gateway import in_process_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler

MODELS = {"m": ServedModel(4096)}
PART = {"type": "text", "text": "a", "colour": "red"}


def parse(route: Route, strict: bool = False, **fields: Any) -> tuple[str, ...]:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if route == "chat" else {"prompt": "hi"}
    )
    body = json.dumps({**prompt, **fields}).encode()
    return JobParser(BodyLimits(), strict).parse(route, body, MODELS).ignored


NAMED: list[tuple[Route, dict[str, Any], tuple[str, ...]]] = [
    ("chat", {}, ()),
    ("chat", {"temprature": 1}, ("temprature",)),
    ("completions", {"temprature": None, "min_q": [1]}, ("temprature", "min_q")),
    ("chat", {"messages": [{"role": "user", "content": "", "mood": 1}] * 3}, ("messages[].mood",)),
    (
        "chat",
        {"messages": [{"role": "user", "content": [PART, PART]}], "a": {"b": 1}},
        ("a", "messages[].content[].colour"),
    ),
    (
        "completions",
        {"stream": True, "stream_options": {"include_obfuscation": True, "pace": 3}},
        ("stream_options.pace",),
    ),
]


@pytest.mark.parametrize(("route", "fields", "ignored"), NAMED)
def test_unknown_fields_are_named(
    route: Route, fields: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    assert parse(route, **fields) == ignored


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temprature": 1}, "temprature"),
        ({"messages": [{"role": "user", "content": "x", "mood": None}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, PART]}]},
            "messages[0].content[1].colour",
        ),
        ({"stream": True, "stream_options": {"pace": 3}}, "stream_options.pace"),
    ],
)
def test_strict_gateways_refuse_unknown_fields(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match="is not a known field; remove it") as refused:
        parse("chat", strict=True, **fields)
    assert refused.value.field == field


def test_a_refused_field_is_named_with_its_value() -> None:
    with pytest.raises(RequestError, match="suffix is 'x', which is not supported; remove it"):
        parse("completions", suffix="x")


def test_hints_are_neither_named_nor_refused() -> None:
    hints = {"user": "u", "metadata": {"a": [1]}, "service_tier": 7, "stream_options": None}
    assert parse("completions", strict=True, **hints) == ()
    message = {"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}
    assert parse("chat", strict=True, messages=[message], verbosity="high") == ()


def test_the_header_is_bounded_and_visible_ascii() -> None:
    fields = {f"é\r\nx-evil: {i}, " + "k" * 5000: i for i in range(1000)}
    names = parse("chat", **fields)
    header = ", ".join(names)
    assert names[-1] == "and 984 more"
    assert names[0].startswith("%C3%A9%0D%0Ax-evil%3A%200%2C%20kkk")
    assert names[0].endswith("...")
    assert header.isascii()
    assert header.isprintable()
    assert len(header) < 1400


async def test_the_answer_names_ignored_fields() -> None:
    async with in_process_gateway(ScriptedScheduler()) as client:
        for stream in (False, True):
            for extra, header in (({"mood": 1, "ägypten": 2}, "mood, %C3%A4gypten"), ({}, None)):
                answer = await post(client, stream=stream, **extra)
                assert answer.status_code == 200, answer.text
                assert answer.headers.get("x-pagewire-ignored") == header


async def post(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, **fields})
