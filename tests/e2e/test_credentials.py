"""Certificates and tokens on every connection: which calls are accepted and which refused."""

import asyncio
import re
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.cli.launch.health import health_problem
from pagewire.config import ProcessConfig
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials, read_token
from pagewire.rpc.transport import Health, bind, make_server, open_channel
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.certificates import Authority
from support.processes.gateway_process import GatewayProcess, gateway
from support.processes.stack_process import running_stack
from support.processes.worker_process import worker_process
from support.waiting import eventually

TOKEN = "a token for these tests"


class ListsModels(inference_pb2_grpc.InferenceServicer):
    """Answers one unary call and one stream."""

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> Any:  # noqa: N802
        return pb.ListModelsResponse(models=[pb.Model(id="m")])

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:  # noqa: N802
        yield pb.GenerateResponse(text=request.prompt)

    async def Multiplex(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield pb.MultiplexResponse(draining=True)


@asynccontextmanager
async def served(credentials: Credentials, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = make_server(credentials)
    inference_pb2_grpc.add_InferenceServicer_to_server(ListsModels(), server)
    Health("pagewire.v1.Inference").attach(server)
    [port] = bind(server, [address], credentials)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def outcome(address: str, credentials: Credentials) -> str:
    """The model's name, `m`, or the name of the status of a call that failed."""
    async with open_channel(address, credentials) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            call = stub.ListModels(
                pb.ListModelsRequest(), metadata=credentials.metadata, timeout=10
            )
            return str((await call).models[0].id)
        except grpc.aio.AioRpcError as error:
            return error.code().name


def credentials(**settings: Any) -> Credentials:
    return Credentials.of(ProcessConfig(**settings))


async def test_tls(tmp_path: Path) -> None:
    """Clients check the server; a server without an authority accepts every client."""
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    identity = ours.identity("scheduler")
    shown = credentials(tls_cert=identity.cert, tls_key=identity.key)
    async with served(shown) as address:
        assert await outcome(address, credentials(tls_ca=ours.ca)) == "m"
        assert await outcome(address, credentials(tls_ca=theirs.ca)) == "UNAVAILABLE"
        assert await outcome(address, NO_CREDENTIALS) == "UNAVAILABLE"
        named = credentials(tls_ca=ours.ca, tls_server_name="scheduler")
        assert await outcome(address, named) == "m"
        other = credentials(tls_ca=ours.ca, tls_server_name="worker")
        assert await outcome(address, other) == "UNAVAILABLE"


async def test_mutual_tls(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    mutual = credentials(**ours.identity("server").settings)
    assert mutual.authenticates_clients
    client, stranger = ours.identity("client"), theirs.identity("client")
    async with served(mutual) as address:
        assert await outcome(address, credentials(**client.settings)) == "m"
        assert await outcome(address, credentials(tls_ca=ours.ca)) == "UNAVAILABLE"
        forged = credentials(tls_cert=stranger.cert, tls_key=stranger.key, tls_ca=ours.ca)
        assert await outcome(address, forged) == "UNAVAILABLE"
    lenient = credentials(**ours.identity("server").settings, tls_verify_clients=False)
    assert not lenient.authenticates_clients
    async with served(lenient) as address:
        assert await outcome(address, credentials(tls_ca=ours.ca)) == "m"


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("authority", "its certificate is not accepted, .*; tls_ca here must have signed"),
        ("name", "its certificate has another name; set tls_server_name to a name in it"),
        ("plain", "it does not use TLS; give it tls_cert and tls_key, or leave tls_ca out here"),
        ("encrypted", "it closes connections before it answers; if it uses TLS, set tls_ca here"),
        ("token", "UNAUTHENTICATED: "),
    ],
)
async def test_a_gateway_logs_once_why_a_scheduler_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, problem: str
) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    peer = ours.identity("peer").settings
    shown = credentials(**({} if fault == "plain" else peer))
    used: dict[str, str] = theirs.identity("own").settings if fault == "authority" else peer
    if fault == "encrypted":
        used = {}
    if fault == "name":
        used = {**used, "tls_server_name": "other"}
    if fault == "token":
        shown, used = NO_CREDENTIALS.with_token(TOKEN), {}
    monkeypatch.setenv("PAGEWIRE_SCHEDULER_TOKEN", "x" * 32)
    async with served(shown) as address:
        process = await asyncio.to_thread(GatewayProcess, address, **used)
        try:
            await eventually(lambda: any(re.search(problem, line) for line in process.log))
            await asyncio.sleep(1.5)  # further attempts
        finally:
            await asyncio.to_thread(process.stop)
    lines = [
        line for line in process.log if re.search(f" W .*scheduler {address}: {problem}", line)
    ]
    assert len(lines) == 1, process.log
    assert "Traceback" not in "".join(process.log)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_token(tmp_path: Path, kind: str) -> None:
    address = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/server.sock"
    holder = NO_CREDENTIALS.with_token(TOKEN)
    async with served(holder, address) as address:
        assert await outcome(address, holder) == "m"
        for token in (None, TOKEN[:-1], TOKEN + "x", TOKEN.upper()):
            assert await outcome(address, NO_CREDENTIALS.with_token(token)) == "UNAUTHENTICATED"
        async with open_channel(address) as channel:
            # Health needs no token; a stream is refused before it sends a message.
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            call = inference_pb2_grpc.InferenceStub(channel).Multiplex(timeout=10)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert TOKEN not in (caught.value.details() or "")


@pytest.mark.parametrize("method", ["ListModels", "Generate"])
async def test_undecodable_messages_are_invalid_arguments(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC alone would answer INTERNAL and log a traceback."""
    async with served(NO_CREDENTIALS) as address, open_channel(address) as channel:
        call = channel.unary_stream(f"/pagewire.v1.Inference/{method}")(b"\xff", timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await outcome(address, NO_CREDENTIALS) == "m"
        stub = inference_pb2_grpc.InferenceStub(channel)
        texts = [r.text async for r in stub.Generate(pb.GenerateRequest(prompt="a"), timeout=10)]
        assert texts == ["a"]
    assert not caplog.records


def test_tokens_are_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(str(file), "NO_SUCH_VARIABLE") == TOKEN
    assert read_token(None, "NO_SUCH_VARIABLE") is None
    monkeypatch.setenv("SOME_TOKEN", "short")
    with pytest.raises(ValueError, match="SOME_TOKEN must have at least 16"):
        read_token(None, "SOME_TOKEN")
    file.write_text("")
    with pytest.raises(ValueError, match="at least 16"):
        read_token(str(file), "NO_SUCH_VARIABLE")
    assert TOKEN not in repr(NO_CREDENTIALS.with_token(TOKEN))
    with pytest.raises(ValueError, match="belong together"):
        credentials(tls_cert="x")


async def test_a_worker_refuses_unknown_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worker_process(tmp_path, "embedded", worker_address="0.0.0.0:0") as worker:
        assert await worker.exit_status() == 1
        assert "is open to other machines; set PAGEWIRE_WORKER_TOKEN" in worker.log
    monkeypatch.setenv("PAGEWIRE_WORKER_TOKEN", TOKEN)
    with worker_process(tmp_path, "embedded", worker_address="0.0.0.0:0") as worker:
        async with asyncio.timeout(60):
            while "ready on" not in worker.log:
                assert worker.process.poll() is None, worker.log
                await asyncio.sleep(0.05)


def generated(url: str, verify: Any = True) -> str:
    body = {"prompt": "Hello", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, verify=verify, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_stack_with_tls_and_tokens_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTPS for clients, mutual TLS and tokens between the services."""
    identity = Authority(tmp_path).identity("pagewire")
    tokens = {name: secrets.token_hex(16) for name in ("SCHEDULER", "WORKER")}
    for name, token in tokens.items():
        monkeypatch.setenv(f"PAGEWIRE_{name}_TOKEN", token)
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in identity.settings.items()]
    flags += [f"--https-cert={identity.cert}", f"--https-key={identity.key}"]
    with running_stack(*flags) as stack:
        assert stack.url.startswith("https://")
        assert generated(stack.url, ssl.create_default_context(cafile=identity.ca))
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{stack.url}/healthz")
        assert asyncio.run(health_problem(f"{stack.url}/readyz")) is None
        assert "no answer" in (asyncio.run(health_problem(stack.grpc_address)) or "")
        mutual = credentials(**identity.settings)
        assert asyncio.run(health_problem(stack.grpc_address, credentials=mutual)) is None
        address = stack.grpc_address
        assert asyncio.run(outcome(address, NO_CREDENTIALS)) == "UNAVAILABLE"
        assert asyncio.run(outcome(address, mutual)) == "UNAUTHENTICATED"
        shown = mutual.with_token(tokens["SCHEDULER"])
        assert asyncio.run(outcome(address, shown)) == "pagewire-chat"
        for token in tokens.values():
            assert token not in "".join(stack.log)


def test_a_gateway_needs_a_certificate_and_its_key(tmp_path: Path) -> None:
    for settings, words in (
        ({"https_cert": "x.pem"}, "belong together"),
        ({"https_cert": "none.pem", "https_key": "none.key"}, "No such file"),
    ):
        with pytest.raises(AssertionError, match=words), gateway("127.0.0.1:1", **settings):
            pass
