"""Reads streams of named events, and removes the differences that depend on timing."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from support.output_events import without_ids


async def events_of(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The data of the events of a stream."""
    async with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def merged(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events without ids, times and numbers, and neighbouring pieces of a text joined.

    The cuts in a text depend on the number of tokens that arrive at once.
    """
    found: list[dict[str, Any]] = []
    for event in events:
        event = without_ids(event)
        event.pop("sequence_number", None)
        before = found[-1] if found else {"type": ""}
        if _text_of(event) is not None and _place(before) == _place(event):
            holder, key = _text_of(before), _text_key(event)
            assert holder is not None
            holder[key] += _text_of(event)[key]  # type: ignore[index]
        else:
            found.append(event)
    return found


def _text_of(event: dict[str, Any]) -> dict[str, Any] | None:
    """The object with the piece of text of a delta."""
    if event["type"].endswith(".delta"):
        return event
    delta = event.get("delta")
    kinds = ("text_delta", "thinking_delta", "input_json_delta")
    return delta if isinstance(delta, dict) and delta.get("type") in kinds else None


def _text_key(event: dict[str, Any]) -> str:
    delta = event["delta"]
    if isinstance(delta, str):
        return "delta"
    return next(name for name in ("text", "thinking", "partial_json") if name in delta)


def _place(event: dict[str, Any]) -> tuple[Any, ...]:
    delta = event.get("delta")
    kind = delta.get("type") if isinstance(delta, dict) else None
    return event["type"], event.get("output_index"), event.get("index"), kind
