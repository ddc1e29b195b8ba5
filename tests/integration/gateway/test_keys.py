"""API keys at a gateway's process: the door, the limits, the reload."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from pagewire.auth.keys import entry_of, new_key
from pagewire.auth.rate_limits import RateLimits
from support.processes.gateway_process import GatewayProcess, command, gateway
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually

BODY = {"prompt": "x", "max_tokens": 2}


@pytest.fixture
async def peer() -> AsyncIterator[ScriptedScheduler]:
    peer = ScriptedScheduler()
    yield peer
    await peer.stop()


class Door:
    """A gateway with a key file that a test may rewrite."""

    def __init__(self, process: GatewayProcess, file: Path) -> None:
        self.process = process
        self.file = file

    async def ask(self, key: str | None, **body: object) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=self.process.url, headers=headers) as client:
            return await client.post("/v1/completions", json=BODY | body)

    def reload(self, text: str) -> None:
        self.file.write_text(text)
        os.kill(self.process.process.pid, signal.SIGHUP)

    async def said(self, words: str) -> None:
        await eventually(lambda: any(words in line for line in self.process.log))


@pytest.fixture
def keys() -> dict[str, str]:
    return {name: new_key() for name in ("ada", "bob", "eve")}


@pytest.fixture
async def door(
    tmp_path: Path, peer: ScriptedScheduler, keys: dict[str, str]
) -> AsyncIterator[Door]:
    file = tmp_path / "keys.yaml"
    bob = RateLimits(requests_per_minute=3, tokens_per_minute=1000, max_concurrent=2)
    file.write_text(
        entry_of("ada", keys["ada"], None, RateLimits())
        + "\n"
        + entry_of("bob", keys["bob"], None, bob)
    )
    manager = gateway(await peer.start(), api_keys_file=str(file))
    process = await asyncio.to_thread(manager.__enter__)
    await asyncio.to_thread(process.wait_ready)
    yield Door(process, file)
    await asyncio.to_thread(manager.__exit__, None, None, None)


async def test_only_keys_open_the_door(door: Door, keys: dict[str, str]) -> None:
    for key in (None, "x", keys["eve"], keys["ada"] + "x"):
        refused = await door.ask(key)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert key is None or len(key) < 2 or key not in refused.text
    answered = await door.ask(keys["ada"])
    assert answered.status_code == 200
    assert not [name for name in answered.headers if name.startswith("x-ratelimit")]
    async with httpx.AsyncClient(base_url=door.process.url) as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/nowhere")).status_code == 401
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        twice = [("authorization", f"Bearer {keys['ada']}")] * 2
        assert (await client.get("/v1/models", headers=twice)).status_code == 401
    for line in door.process.log:
        assert not any(key in line for key in keys.values())


async def test_openai_client(door: Door, keys: dict[str, str]) -> None:
    async def create(key: str) -> object:
        async with openai.AsyncOpenAI(
            base_url=f"{door.process.url}/v1", api_key=key, max_retries=0
        ) as client:
            return await client.completions.create(model="scripted", prompt="x", max_tokens=1)

    await create(keys["ada"])
    with pytest.raises(openai.AuthenticationError):
        await create(keys["eve"])


async def test_limits(door: Door, keys: dict[str, str], peer: ScriptedScheduler) -> None:
    first = await door.ask(keys["bob"])
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"

    peer.step = 0.02
    long = asyncio.create_task(door.ask(keys["bob"], prompt=["x", "y"], max_tokens=20))
    await eventually(lambda: peer.running == 2)
    busy = await door.ask(keys["bob"])
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
    assert busy.json()["error"]["code"] == "rate_limit_exceeded"
    assert (await door.ask(keys["ada"])).status_code == 200
    assert (await long).status_code == 200
    # The three requests a minute are used up by the next; its place at once was given back.
    assert (await door.ask(keys["bob"])).status_code == 200
    spent = await door.ask(keys["bob"])
    assert spent.status_code == 429
    assert 1 <= int(spent.headers["retry-after"]) <= 20
    assert spent.headers["x-ratelimit-remaining-requests"] == "0"


async def test_bodies_that_never_arrive_cost_their_own_key_only(
    door: Door, keys: dict[str, str]
) -> None:
    host, _, port = door.process.url.removeprefix("http://").rpartition(":")

    async def begin(key: str) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\nauthorization: Bearer " + key.encode() + b"\r\n\r\n{"
        )
        opened.append(writer)
        return reader

    opened: list[asyncio.StreamWriter] = []
    waiting = [await begin(keys["bob"]) for _ in range(2)]
    await asyncio.sleep(0.3)
    refused = await asyncio.wait_for((await begin(keys["bob"])).readline(), 5)
    assert refused.split()[1] == b"429"
    assert (await door.ask(keys["bob"])).status_code == 429
    assert (await door.ask(keys["ada"])).status_code == 200
    assert not any(reader.at_eof() for reader in waiting)
    for writer in opened:
        writer.close()
    async with asyncio.timeout(5):
        while (await door.ask(keys["bob"])).status_code != 200:
            await asyncio.sleep(0.05)


async def test_tokens_are_charged_when_the_client_leaves(
    door: Door, keys: dict[str, str], peer: ScriptedScheduler
) -> None:
    peer.step = 0.01
    headers = {"authorization": f"Bearer {keys['bob']}"}
    body = {"prompt": "x", "max_tokens": 900, "stream": True}
    async with httpx.AsyncClient(base_url=door.process.url, headers=headers) as client:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.headers["x-ratelimit-remaining-tokens"] in ("99", "100", "101")
            async for _ in answer.aiter_lines():
                break
        await eventually(lambda: peer.running == 0)
        after = await client.post("/v1/completions", json=BODY)
    assert int(after.headers["x-ratelimit-remaining-tokens"]) > 850


async def test_reload(door: Door, keys: dict[str, str]) -> None:
    assert (await door.ask(keys["eve"])).status_code == 401
    door.reload("- {name: broken")
    await door.said("the API keys stay as they were")
    assert (await door.ask(keys["ada"])).status_code == 200
    door.reload(entry_of("eve", keys["eve"], None, RateLimits()))
    await door.said("1 API keys")
    assert (await door.ask(keys["eve"])).status_code == 200
    assert (await door.ask(keys["ada"])).status_code == 401


def test_bad_keys_keep_a_gateway_from_starting(tmp_path: Path) -> None:
    config = {"schedulers": "127.0.0.1:1", "port": 0, "api_keys_file": str(tmp_path / "none")}
    done = subprocess.run(command(config), capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "none" in done.stderr


def test_keys_new_makes_a_file_that_opens(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    made = [_new("ada", "--file", str(file), "--requests-per-minute", "9") for _ in range(2)]
    assert made[0].returncode == 0, made[0].stderr
    assert made[1].returncode == 1
    assert "already" in made[1].stderr
    assert made[0].stdout.startswith("pw-")
    assert file.stat().st_mode & 0o077 == 0
    assert '"requests_per_minute": 9' in file.read_text()
    assert made[0].stdout.strip() not in file.read_text()
    assert "sha256" in _new("bob").stdout


@pytest.mark.parametrize(
    ("before", "arguments", "words"),
    [
        ("", ("",), "name must be a text"),
        ("", ("bob", "--tenant", ""), "tenant must be a text"),
        ("- {name: [}", ("bob",), "neither YAML nor JSON"),
        (f"[{json.dumps({'name': 'ada', 'sha256': 'ab' * 32})}]\n", ("bob",), "with this line"),
    ],
)
def test_keys_new_leaves_no_file_that_a_gateway_could_not_read(
    tmp_path: Path, before: str, arguments: tuple[str, ...], words: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(before)
    done = _new(*arguments, "--file", str(file))
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stdout == ""
    assert file.read_text() == before


def _new(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagewire.cli.main", "keys", "new", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
