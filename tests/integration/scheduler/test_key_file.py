"""API keys of a scheduler's process, at its start and when it rereads them."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.auth.keys import entry_of, new_key
from pagewire.auth.rate_limits import RateLimits
from pagewire.cli.launch.ports import free_port
from pagewire.rpc.credentials import NO_CREDENTIALS
from pagewire.rpc.transport import open_channel
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.certificates import Authority
from support.processes.gateway_process import gateway
from support.processes.simulated_workers import simulated_workers
from support.processes.stack_process import running_stack
from support.waiting import until

TOKEN = "a token for these tests"
ANY = RateLimits()


def command(*flags: str, workers: str = "127.0.0.1:1") -> list[str]:
    return [sys.executable, "-m", "pagewire.cli.main", "scheduler", f"--workers={workers}", *flags]


def start_of(*flags: str, **environment: str) -> tuple[int | None, str]:
    """The exit status of a scheduler, None if it has started, and its log."""
    process = subprocess.Popen(
        command(*flags), stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "listening on" in line:
            process.kill()
            process.wait()
            process.stderr.close()
            return None, said
    process.stderr.close()
    return process.wait(20), said


def test_keys_need_credentials_that_gateways_can_show(tmp_path: Path) -> None:
    keys = {"PAGEWIRE_API_KEYS": new_key()}
    everywhere = ("--grpc-host=0.0.0.0", "--grpc-port=0")
    status, said = start_of(*everywhere, **keys)
    assert status == 1
    assert "is open to other machines and has API keys" in said
    assert "PAGEWIRE_SCHEDULER_TOKEN" in said
    identity = Authority(tmp_path).identity("scheduler")
    tls = [f"--{name.replace('_', '-')}={path}" for name, path in identity.settings.items()]
    assert start_of(*everywhere, *tls, "--no-tls-verify-clients", **keys)[0] == 1
    assert start_of(*everywhere, *tls, **keys)[0] is None
    assert start_of(*everywhere, PAGEWIRE_SCHEDULER_TOKEN=TOKEN, **keys)[0] is None
    assert start_of(*everywhere)[0] is None
    status, said = start_of("--grpc-port=0", **keys)
    assert status is None
    assert all(key not in said for key in keys.values())


def test_bad_keys_keep_a_scheduler_from_starting(tmp_path: Path) -> None:
    status, said = start_of("--grpc-port=0", f"--api-keys-file={tmp_path}/none")
    assert status == 1
    assert "none" in said


async def outcome(address: str, shown: tuple[tuple[str, str], ...]) -> str:
    """`OK` for a response with tokens, otherwise the name of the status."""
    message = pb.GenerateRequest(prompt="Hello", stop=pb.StopConditions(max_tokens=3))
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            parts = [r async for r in stub.Generate(message, metadata=shown, timeout=20)]
        except grpc.aio.AioRpcError as error:
            return error.code().name
        assert sum(len(part.token_ids) for part in parts) == 3
        return "OK"


def key_shown(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def test_keys_are_read_again_and_a_gateway_gets_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key works until it is removed; a gateway without a key calls with the token."""
    monkeypatch.setenv("PAGEWIRE_SCHEDULER_TOKEN", TOKEN)
    ada, bob, file, log = new_key(), new_key(), tmp_path / "keys.yaml", tmp_path / "log"
    of_ada = entry_of("ada", ada, None, RateLimits(requests_per_minute=3))
    file.write_text(of_ada)
    address = f"127.0.0.1:{free_port()}"
    with simulated_workers(tmp_path) as workers, log.open("wb") as output:
        flags = (f"--grpc-port={address.rpartition(':')[2]}", f"--api-keys-file={file}")
        process = subprocess.Popen(command(*flags, workers=workers.addresses[0]), stderr=output)

        def reload(text: str, words: str) -> None:
            file.write_text(text)
            said = log.read_text().count(words)
            process.send_signal(signal.SIGHUP)
            until(lambda: log.read_text().count(words) > said)

        try:
            until(lambda: "ready" in log.read_text(), 30)
            _ready(address)
            assert asyncio.run(outcome(address, key_shown(ada))) == "OK"
            assert asyncio.run(outcome(address, key_shown(bob))) == "UNAUTHENTICATED"
            assert asyncio.run(outcome(address, NO_CREDENTIALS.with_token(TOKEN).metadata)) == "OK"
            reload("- {name: broken", "the API keys stay as they were")
            assert asyncio.run(outcome(address, key_shown(ada))) == "OK"
            of_bob = entry_of("bob", bob, None, ANY)
            reload(of_bob, "1 API keys")
            assert asyncio.run(outcome(address, key_shown(ada))) == "UNAUTHENTICATED"
            assert asyncio.run(outcome(address, key_shown(bob))) == "OK"
            reload(f"{of_ada}\n{of_bob}", "2 API keys")
            assert asyncio.run(outcome(address, key_shown(ada))) == "OK"
            # The budget is not renewed: three in this minute, with the removal in between.
            assert asyncio.run(outcome(address, key_shown(ada))) == "RESOURCE_EXHAUSTED"
            _through_a_gateway(address)
            assert all(secret not in log.read_text() for secret in (ada, bob, TOKEN))
        finally:
            process.kill()
            process.wait()


def _ready(address: str) -> None:
    until(lambda: asyncio.run(outcome(address, NO_CREDENTIALS.with_token(TOKEN).metadata)) == "OK")


def _through_a_gateway(address: str) -> None:
    import httpx

    with gateway(address) as served:
        served.wait_ready()
        body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 3}
        assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 200


def test_a_stack_with_keys_asks_for_one_over_http_and_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gateway calls the scheduler with a token that the stack creates."""
    import httpx

    key = new_key()
    monkeypatch.setenv("PAGEWIRE_API_KEYS", f"ada={key}")
    with running_stack() as stack:
        body = {"prompt": "Hello", "max_tokens": 3}
        url = f"{stack.url}/v1/completions"
        assert httpx.post(url, json=body, timeout=60).status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        assert asyncio.run(outcome(stack.grpc_address, key_shown(key))) == "OK"
        assert asyncio.run(outcome(stack.grpc_address, ())) == "UNAUTHENTICATED"

        async def load(shown: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
            async with open_channel(stack.grpc_address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.GetLoad(pb.GetLoadRequest(), metadata=shown)
                return caught.value.code()

        assert asyncio.run(load(())) is grpc.StatusCode.UNAUTHENTICATED
        assert asyncio.run(load(key_shown(key))) is grpc.StatusCode.PERMISSION_DENIED
        assert key not in "".join(stack.log)
