"""A gateway in front of two models: one that is lost or overloaded does not affect the other."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire.auth.keys import entry_of, new_key
from pagewire.auth.rate_limits import RateLimits
from support.processes.gateway_process import ready_gateway
from support.scripted.scripted_scheduler import MODEL, ScriptedScheduler, expected_text
from support.waiting import eventually

OTHER = "org/second:7b"
TOKENS = 12


@pytest.fixture
async def other() -> AsyncIterator[ScriptedScheduler]:
    """A scheduler of another model."""
    other = ScriptedScheduler(model=OTHER)
    yield other
    await other.stop()


async def complete(
    client: httpx.AsyncClient, model: str | None = None, **fields: Any
) -> httpx.Response:
    """The answer to a completion request."""
    body = {"prompt": "x", "seed": 3, "max_tokens": TOKENS, **fields}
    return await client.post("/v1/completions", json={"model": model, **body})


def is_whole(answer: httpx.Response) -> bool:
    """Whether an answer has the text of the script."""
    text = expected_text("x", 3, TOKENS)
    return answer.status_code == 200 and answer.json()["choices"][0]["text"] == text


async def test_both_models_are_listed_and_served_by_name(
    peer: ScriptedScheduler, other: ScriptedScheduler
) -> None:
    addresses = f"{await peer.start()},{await other.start()}"
    async with (
        ready_gateway(addresses) as process,
        httpx.AsyncClient(base_url=process.url, timeout=20) as client,
    ):

        async def listed() -> list[str]:
            return [card["id"] for card in (await client.get("/v1/models")).json()["data"]]

        while await listed() != sorted([MODEL, OTHER]):
            await asyncio.sleep(0.05)
        assert (await client.get(f"/v1/models/{OTHER}")).json()["id"] == OTHER
        for model in (MODEL, OTHER):
            answer = await complete(client, model)
            assert is_whole(answer)
            assert answer.json()["model"] == model
        assert [len(each.submitted) for each in (peer, other)] == [1, 1]
        unnamed = await complete(client)
        assert unnamed.status_code == 400
        assert unnamed.json()["error"]["param"] == "model"
        unknown = await complete(client, "third")
        assert unknown.status_code == 404
        served = ", ".join(sorted([MODEL, OTHER]))
        message = f"the model 'third' does not exist; served are {served}"
        assert unknown.json()["error"]["message"] == message


async def test_an_overloaded_model_is_refused_and_the_other_served(
    peer: ScriptedScheduler, other: ScriptedScheduler
) -> None:
    peer.retry_after = 7
    async with (
        ready_gateway(f"{await peer.start()},{await other.start()}") as process,
        httpx.AsyncClient(base_url=process.url, timeout=20) as client,
    ):
        while (refused := await complete(client, MODEL)).status_code != 429:
            await asyncio.sleep(0.05)
        assert refused.headers["retry-after"] == "7"
        message = f"too many requests for the model {MODEL!r} are waiting already"
        assert refused.json()["error"]["message"].startswith(message)
        submitted = len(peer.submitted)
        answers = await asyncio.gather(*(complete(client, OTHER) for _ in range(20)))
        assert all(map(is_whole, answers))
        assert (await complete(client, MODEL)).status_code == 429
        assert len(peer.submitted) == submitted, "the gateway refused it"


async def test_requests_that_wait_for_a_lost_model_leave_room_for_the_other(
    peer: ScriptedScheduler, other: ScriptedScheduler
) -> None:
    address = await peer.start()
    async with (
        ready_gateway(
            f"{address},{await other.start()}",
            max_open_requests=8,
            expected_models=f"{MODEL}, {OTHER}",
        ) as process,
        httpx.AsyncClient(base_url=process.url, timeout=20) as client,
    ):
        assert is_whole(await complete(client, OTHER))
        await peer.stop()
        waiting = [asyncio.create_task(complete(client, MODEL)) for _ in range(4)]

        async def load() -> int:
            return int((await client.get("/load")).json()["server_load"])

        while await load() < 4:
            await asyncio.sleep(0.02)
        refused = await complete(client, MODEL)
        assert refused.status_code == 429
        assert "retry-after" in refused.headers
        assert f"4 requests for the model {MODEL!r}" in refused.json()["error"]["message"]
        tokenized = await client.post("/tokenize", json={"model": MODEL, "prompt": "x"})
        assert tokenized.status_code == 429, "a call waits, too"
        answers = await asyncio.gather(*(complete(client, OTHER) for _ in range(4)))
        assert all(map(is_whole, answers))
        await peer.start(address)
        await eventually(lambda: all(task.done() for task in waiting), 15)
        assert all(is_whole(task.result()) for task in waiting)


async def test_a_model_that_is_not_served_yet_holds_no_other_up(
    peer: ScriptedScheduler, other: ScriptedScheduler
) -> None:
    address, missing = await peer.start(), await other.start()
    await other.stop()
    settings = {"expected_models": f"{MODEL},{OTHER}"}
    async with (
        ready_gateway(f"{address},{missing}", **settings) as process,
        httpx.AsyncClient(base_url=process.url, timeout=20) as client,
    ):
        assert is_whole(await complete(client, MODEL))
        early = await complete(client, OTHER)
        assert early.status_code == 503
        assert early.headers["retry-after"]
        assert early.json()["error"]["param"] == "model"
        assert (await client.get(f"/v1/models/{OTHER}")).status_code == 503
        absent = await client.get("/v1/models/third")
        assert absent.status_code == 404
        assert absent.json()["error"]["code"] == "model_not_found"
        absent = await client.get("/v1/models/third", headers={"anthropic-version": "2023-06-01"})
        assert absent.status_code == 404
        assert absent.json()["error"]["type"] == "not_found_error"
        assert absent.json()["request_id"] == absent.headers["request-id"]
        await other.start(missing)
        while (late := await complete(client, OTHER)).status_code == 503:
            await asyncio.sleep(0.05)
        assert is_whole(late)


async def test_the_limits_of_a_key_hold_for_all_models_together(
    peer: ScriptedScheduler, other: ScriptedScheduler, tmp_path: Path
) -> None:
    key = new_key()
    file = tmp_path / "keys.yaml"
    file.write_text(entry_of("ada", key, None, RateLimits(requests_per_minute=2), False))
    addresses = f"{await peer.start()},{await other.start()}"
    async with (
        ready_gateway(
            addresses, api_keys_file=str(file), expected_models=f"{MODEL},{OTHER}"
        ) as process,
        httpx.AsyncClient(base_url=process.url, timeout=20) as client,
    ):
        assert (await complete(client, MODEL)).status_code == 401
        client.headers["authorization"] = f"Bearer {key}"
        ids: list[str] = []
        while len(ids) < 2:
            ids = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert is_whole(await complete(client, MODEL))
        assert is_whole(await complete(client, OTHER))
        for model in (MODEL, OTHER):
            refused = await complete(client, model)
            assert refused.status_code == 429
            assert "2 requests a minute" in refused.json()["error"]["message"]
