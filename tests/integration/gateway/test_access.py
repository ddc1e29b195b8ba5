"""API keys at a gateway process: access, limits, and reloads."""

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
from support.processes.gateway_process import GatewayProcess, command, ready_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually

BODY = {"prompt": "x", "max_tokens": 2}


class GatewayWithKeys:
    """A gateway process with a key file that a test may rewrite."""

    def __init__(self, process: GatewayProcess, file: Path) -> None:
        self.process = process
        self.file = file

    async def post(self, key: str | None, **body: object) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=self.process.url, headers=headers) as client:
            return await client.post("/v1/completions", json=BODY | body)

    def reload(self, text: str) -> None:
        self.file.write_text(text)
        os.kill(self.process.process.pid, signal.SIGHUP)

    async def logged(self, words: str) -> None:
        await eventually(lambda: any(words in line for line in self.process.log))


@pytest.fixture
def keys() -> dict[str, str]:
    return {name: new_key() for name in ("ada", "bob", "eve")}


@pytest.fixture
async def gateway(
    tmp_path: Path, peer: ScriptedScheduler, keys: dict[str, str]
) -> AsyncIterator[GatewayWithKeys]:
    file = tmp_path / "keys.yaml"
    bob = RateLimits(requests_per_minute=3, tokens_per_minute=1000, max_concurrent=2)
    file.write_text(
        entry_of("ada", keys["ada"], None, RateLimits())
        + "\n"
        + entry_of("bob", keys["bob"], None, bob)
    )
    async with ready_gateway(await peer.start(), api_keys_file=str(file)) as process:
        yield GatewayWithKeys(process, file)


async def test_only_requests_with_a_key_are_accepted(
    gateway: GatewayWithKeys, keys: dict[str, str]
) -> None:
    for key in (None, "x", keys["eve"], keys["ada"] + "x"):
        refused = await gateway.post(key)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert key is None or len(key) < 2 or key not in refused.text
    answered = await gateway.post(keys["ada"])
    assert answered.status_code == 200
    assert not [name for name in answered.headers if name.startswith("x-ratelimit")]
    async with httpx.AsyncClient(base_url=gateway.process.url) as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/nowhere")).status_code == 401
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        twice = [("authorization", f"Bearer {keys['ada']}")] * 2
        assert (await client.get("/v1/models", headers=twice)).status_code == 401
    for line in gateway.process.log:
        assert not any(key in line for key in keys.values())


async def test_the_openai_client_with_a_key(gateway: GatewayWithKeys, keys: dict[str, str]) -> None:
    async def create(key: str) -> object:
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.process.url}/v1", api_key=key, max_retries=0
        ) as client:
            return await client.completions.create(model="scripted", prompt="x", max_tokens=1)

    await create(keys["ada"])
    with pytest.raises(openai.AuthenticationError):
        await create(keys["eve"])


async def test_the_limits_of_a_key(
    gateway: GatewayWithKeys, keys: dict[str, str], peer: ScriptedScheduler
) -> None:
    first = await gateway.post(keys["bob"])
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"

    peer.step = 0.02
    long = asyncio.create_task(gateway.post(keys["bob"], prompt=["x", "y"], max_tokens=20))
    await eventually(lambda: peer.running == 2)
    busy = await gateway.post(keys["bob"])
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
    assert busy.json()["error"]["code"] == "rate_limit_exceeded"
    assert (await gateway.post(keys["ada"])).status_code == 200
    assert (await long).status_code == 200
    # The next request is the third in this minute. No other prompt of the key is open now.
    assert (await gateway.post(keys["bob"])).status_code == 200
    spent = await gateway.post(keys["bob"])
    assert spent.status_code == 429
    assert 1 <= int(spent.headers["retry-after"]) <= 20
    assert spent.headers["x-ratelimit-remaining-requests"] == "0"


async def test_bodies_that_never_arrive_block_only_their_own_key(
    gateway: GatewayWithKeys, keys: dict[str, str]
) -> None:
    async def begin(key: str) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*gateway.process.address)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\nauthorization: Bearer " + key.encode() + b"\r\n\r\n{"
        )
        opened.append(writer)
        return reader

    opened: list[asyncio.StreamWriter] = []
    waiting = [await begin(keys["bob"]) for _ in range(2)]
    await eventually(lambda: gateway.process.metric("open_requests") == 2)
    refused = await asyncio.wait_for((await begin(keys["bob"])).readline(), 5)
    assert refused.split()[1] == b"429"
    assert (await gateway.post(keys["bob"])).status_code == 429
    assert (await gateway.post(keys["ada"])).status_code == 200
    assert not any(reader.at_eof() for reader in waiting)
    for writer in opened:
        writer.close()
    async with asyncio.timeout(5):
        while (await gateway.post(keys["bob"])).status_code != 200:
            await asyncio.sleep(0.05)


async def test_a_client_that_leaves_is_charged_for_the_tokens_it_used(
    gateway: GatewayWithKeys, keys: dict[str, str], peer: ScriptedScheduler
) -> None:
    peer.step = 0.01
    headers = {"authorization": f"Bearer {keys['bob']}"}
    body = {"prompt": "x", "max_tokens": 900, "stream": True}
    async with httpx.AsyncClient(base_url=gateway.process.url, headers=headers) as client:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.headers["x-ratelimit-remaining-tokens"] in ("99", "100", "101")
            async for _ in answer.aiter_lines():
                break
        await eventually(lambda: peer.running == 0)
        after = await client.post("/v1/completions", json=BODY)
    assert int(after.headers["x-ratelimit-remaining-tokens"]) > 850


async def test_keys_are_reloaded(gateway: GatewayWithKeys, keys: dict[str, str]) -> None:
    assert (await gateway.post(keys["eve"])).status_code == 401
    gateway.reload("- {name: broken")
    await gateway.logged("the API keys stay as they were")
    assert (await gateway.post(keys["ada"])).status_code == 200
    gateway.reload(entry_of("eve", keys["eve"], None, RateLimits()))
    await gateway.logged("1 API keys")
    assert (await gateway.post(keys["eve"])).status_code == 200
    assert (await gateway.post(keys["ada"])).status_code == 401


def test_a_gateway_with_unreadable_keys_does_not_start(tmp_path: Path) -> None:
    config = {"schedulers": "127.0.0.1:1", "port": 0, "api_keys_file": str(tmp_path / "none")}
    done = subprocess.run(command(config), capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "none" in done.stderr


def test_keys_new_writes_a_key_file(tmp_path: Path) -> None:
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
def test_keys_new_refuses_to_write_an_unreadable_file(
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
