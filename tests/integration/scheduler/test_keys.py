"""API keys at the scheduler's gRPC port: allowed calls, owners of requests, and charges of keys.
The scheduler's own server and interceptors, with scripted workers."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagewire.auth.accounts import Account
from pagewire.auth.callers import Callers
from pagewire.auth.keys import ApiKey, KeyRing, new_key, read_keys
from pagewire.auth.rate_limits import RateLimits
from pagewire.config import ProcessConfig, SchedulerConfig
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials
from pagewire.rpc.transport import Health, bind, open_channel
from pagewire.scheduler.auth import SERVICE_NAME, public_server
from pagewire.scheduler.service import InferenceService
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from pagewire.v1 import worker_pb2 as worker_pb
from pagewire.v1.snapshot_pb2 import SnapshotRequest
from support.processes.certificates import Authority
from support.scripted.scheduler_stack import Stack, collect, request, stacks, worker_info
from support.waiting import eventually

TOKEN = "a token for these tests"
PEER = NO_CREDENTIALS.with_token(TOKEN)
ANY = RateLimits()
LIMIT = 10**9
PATH = f"/{SERVICE_NAME}/"
Metadata = tuple[tuple[str, str], ...]


def key_of(name: str, key: str, limits: RateLimits) -> ApiKey:
    ring = read_keys(None, f"{name}={key}")
    assert ring is not None
    found = ring.find(key.encode())
    assert found is not None
    return ApiKey(name, found.digest, f"tenant of {name}", limits)


@dataclass
class KeyedScheduler:
    """The scheduler of a stack behind its own server. The clock never moves: no bucket fills."""

    stack: Stack
    stub: inference_pb2_grpc.InferenceStub
    channel: grpc.aio.Channel
    callers: Callers
    keys: dict[str, str]
    ring: list[ApiKey]

    def shows(self, name: str) -> Metadata:
        return (("authorization", f"Bearer {self.keys[name]}"),)

    def account(self, name: str) -> Account:
        account = self.callers.find(self.keys[name].encode())
        assert account is not None
        return account

    async def generate(self, name: str, message: pb.GenerateRequest) -> list[int]:
        return (await collect(self.stub.Generate(message, metadata=self.shows(name))))[0]


@asynccontextmanager
async def opened(
    tmp_path: Path,
    credentials: Credentials = PEER,
    config: SchedulerConfig | None = None,
    info: worker_pb.WorkerInfo | None = None,
    **limits: RateLimits,
) -> AsyncIterator[KeyedScheduler]:
    keys = {name: new_key() for name in limits}
    ring = [key_of(name, keys[name], limits[name]) for name in limits]
    callers = Callers(lambda: KeyRing(ring), lambda: 0.0)
    async with stacks(tmp_path) as start:
        stack = await start(info or worker_info())
        server = public_server(config or SchedulerConfig(), credentials, callers)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(stack.engine), server)
        health = Health(SERVICE_NAME)
        health.attach(server)
        await health.set_serving(True)
        [port] = bind(server, ["127.0.0.1:0"], credentials)
        await server.start()
        async with open_channel(f"127.0.0.1:{port}", credentials) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            try:
                yield KeyedScheduler(stack, stub, channel, callers, keys, ring)
            finally:
                await server.stop(None)


async def status(call: Any) -> tuple[str, str, str | None]:
    """The name of the status of a call, its details, and the retry time (milliseconds)."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        trailers = dict(error.trailing_metadata() or ())
        return error.code().name, error.details() or "", trailers.get("grpc-retry-pushback-ms")
    return "OK", "", None


def calls(stub: Any, metadata: Metadata) -> dict[str, Any]:
    """One call of each method."""
    text = pb.TokenizeRequest(text="Hello")
    return {
        "Generate": stub.Generate(request([1, 2], 2), metadata=metadata),
        "Abort": stub.Abort(pb.AbortRequest(request_id="x"), metadata=metadata),
        "Tokenize": stub.Tokenize(text, metadata=metadata),
        "Detokenize": stub.Detokenize(pb.DetokenizeRequest(token_ids=[65]), metadata=metadata),
        "ListModels": stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
        "GetLoad": stub.GetLoad(pb.GetLoadRequest(), metadata=metadata),
        "GetSnapshot": stub.GetSnapshot(SnapshotRequest(), metadata=metadata),
        "Multiplex": _closed(stub.Multiplex(metadata=metadata)),
    }


def _closed(call: Any) -> Any:
    async def run() -> None:
        # A stream that is refused may have ended by now.
        with suppress(asyncio.InvalidStateError):
            await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass

    return run()


async def statuses(stub: Any, metadata: Metadata) -> dict[str, str]:
    return {name: (await status(call))[0] for name, call in calls(stub, metadata).items()}


FOR_ALL = ("Generate", "Abort", "Tokenize", "Detokenize", "ListModels")
FOR_PEERS = ("GetLoad", "GetSnapshot", "Multiplex")
DENIED = "PERMISSION_DENIED"


async def test_keys_allow_the_methods_of_clients_and_the_token_all_methods(tmp_path: Path) -> None:
    async with opened(tmp_path, ada=ANY) as server:
        ada = dict.fromkeys(FOR_ALL, "OK") | dict.fromkeys(FOR_PEERS, DENIED)
        assert await statuses(server.stub, server.shows("ada")) == ada
        assert set((await statuses(server.stub, PEER.metadata)).values()) == {"OK"}
        strangers: list[Metadata] = [
            (),
            (("authorization", f"Bearer {new_key()}"),),
            (("authorization", server.keys["ada"]),),
            (("authorization", f"Basic {server.keys['ada']}"),),
            (("authorization", f"Bearer {TOKEN}x"),),
            server.shows("ada") * 2,
            (*server.shows("ada"), *PEER.metadata),
        ]
        for shown in strangers:
            assert set((await statuses(server.stub, shown)).values()) == {"UNAUTHENTICATED"}, shown
        _, details, _ = await status(server.stub.ListModels(pb.ListModelsRequest()))
        assert "the call has no API key; send one as metadata" in details
        lower = (("authorization", f"bearer {server.keys['ada']}"),)
        assert (await status(server.stub.ListModels(pb.ListModelsRequest(), metadata=lower)))[
            0
        ] == "OK"
        health = health_pb2_grpc.HealthStub(server.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        reflection = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        found = [r async for r in reflection.ServerReflectionInfo(iter([asked]))]
        assert SERVICE_NAME in str(found[0])


async def test_without_a_token_a_server_of_this_machine_takes_gateways(tmp_path: Path) -> None:
    async with opened(tmp_path, NO_CREDENTIALS, ada=ANY) as server:
        keyless = dict.fromkeys(FOR_ALL, "UNAUTHENTICATED") | dict.fromkeys(FOR_PEERS, "OK")
        assert await statuses(server.stub, ()) == keyless
        ada = dict.fromkeys(FOR_ALL, "OK") | dict.fromkeys(FOR_PEERS, DENIED)
        assert await statuses(server.stub, server.shows("ada")) == ada


async def test_a_call_with_a_certificate_and_no_key_is_a_peers(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    mutual = Credentials.of(ProcessConfig(**authority.identity("pagewire").settings))
    async with opened(tmp_path, mutual, ada=ANY) as server:
        assert set((await statuses(server.stub, ())).values()) == {"OK"}
        assert (await statuses(server.stub, server.shows("ada")))["Multiplex"] == DENIED
        wrong = (("authorization", f"Bearer {new_key()}"),)
        assert set((await statuses(server.stub, wrong)).values()) == {"UNAUTHENTICATED"}
    # A scheduler that does not verify its clients identifies gateways only by the token.
    lenient = replace(mutual, verify_clients=False, token=TOKEN)
    (tmp_path / "lenient").mkdir()
    async with opened(tmp_path / "lenient", lenient, ada=ANY) as server:
        assert set((await statuses(server.stub, ())).values()) == {"UNAUTHENTICATED"}
        assert set((await statuses(server.stub, PEER.metadata)).values()) == {"OK"}
        assert (await statuses(server.stub, server.shows("ada")))["Generate"] == "OK"


async def test_the_tenant_is_the_keys(tmp_path: Path) -> None:
    async with opened(tmp_path, ada=ANY) as server:
        server.stack.workers[0].step_seconds = 0.02
        wanted = request([1, 2], 50, request_id="r", tenant="another tenant")
        running = asyncio.create_task(server.generate("ada", wanted))
        await eventually(lambda: server.stack.engine.load().running == 1)
        [found] = server.stack.engine.endings.open.named("r")
        assert found.sequence is not None
        assert found.sequence.tenant == "tenant of ada"
        running.cancel()
        peer = server.stub.Generate(wanted, metadata=PEER.metadata)
        await peer.read()
        await eventually(lambda: len(server.stack.engine.endings.open.named("r", "")) == 1)
        [found] = server.stack.engine.endings.open.named("r", "")
        assert found.sequence is not None
        assert found.sequence.tenant == "another tenant"
        peer.cancel()


async def test_ids_are_those_of_a_key(tmp_path: Path) -> None:
    """Requests of different keys may have the same id; a key aborts its own, a peer aborts any."""
    async with opened(tmp_path, ada=ANY, bob=ANY, eve=ANY) as server:
        server.stack.workers[0].step_seconds = 0.02

        async def begin(metadata: Metadata) -> Any:
            call = server.stub.Generate(request([1], 150, request_id="same"), metadata=metadata)
            assert (await call.read()).request_id == "same"
            return call

        async def abort(metadata: Metadata) -> bool:
            asked = pb.AbortRequest(request_id="same")
            return (await server.stub.Abort(asked, metadata=metadata)).found

        ada, bob = await begin(server.shows("ada")), await begin(server.shows("bob"))
        peer = await begin(PEER.metadata)
        code, details, _ = await status(
            server.stub.Generate(request([1], 5, request_id="same"), metadata=server.shows("ada"))
        )
        assert code == "INVALID_ARGUMENT"
        assert "is running already" in details
        assert not await abort(server.shows("eve"))
        assert await abort(server.shows("bob"))
        assert (await _end(bob)).reason == pb.FINISH_REASON_ABORT
        assert not await abort(server.shows("bob"))
        assert server.stack.engine.num_open == 2
        assert await abort(PEER.metadata)
        for call in (ada, peer):
            assert (await _end(call)).reason == pb.FINISH_REASON_ABORT
        assert not await abort(PEER.metadata)
        await server.stack.settle()
        assert not server.stack.engine.endings.open._by_id


async def _end(call: Any) -> pb.Finish:
    while (response := await call.read()) is not grpc.aio.EOF:
        if response.HasField("finish"):
            return response.finish
    raise AssertionError("it has no end")


async def test_limits(tmp_path: Path) -> None:
    bob = RateLimits(requests_per_minute=4, tokens_per_minute=100, max_concurrent=1)
    async with opened(tmp_path, ada=ANY, bob=bob) as server:
        server.stack.workers[0].step_seconds = 0.02
        shown = server.shows("bob")
        running = server.stub.Generate(request([1, 2], 60), metadata=shown)
        await running.read()
        busy = await status(server.stub.Generate(request([1], 1), metadata=shown))
        assert busy == (
            "RESOURCE_EXHAUSTED",
            "this API key may run 1 prompts at once and 1 are running; retry in 1 s",
            "1000",
        )
        assert len(await server.generate("ada", request([1], 3))) == 3
        running.cancel()
        account = server.account("bob")
        await eventually(lambda: account.open == 0)
        assert 3 <= account.charged < 40, "what was generated before it was cancelled"
        charged = account.charged
        many = await status(server.stub.Generate(request([1, 2], 98), metadata=shown))
        assert many[0] == "RESOURCE_EXHAUSTED"
        assert "may use 100 tokens a minute" in many[1]
        assert int(many[2] or 0) >= 1000
        assert account.charged == charged
        # The fourth: a request that does not decode counts, as invalid ones do over HTTP.
        garbage = server.channel.unary_stream(f"{PATH}Generate")(b"\xff", metadata=shown)
        assert (await status(garbage))[0] == "INVALID_ARGUMENT"
        text = pb.TokenizeRequest(text="Hello")
        assert (await status(server.stub.Tokenize(text, metadata=shown)))[0] == "OK"
        spent = await status(server.stub.Tokenize(text, metadata=shown))
        assert spent == (
            "RESOURCE_EXHAUSTED",
            "this API key may send 4 requests a minute; retry in 15 s",
            "15000",
        )
        asked = pb.DetokenizeRequest(token_ids=[65])
        assert (await status(server.stub.Detokenize(asked, metadata=shown)))[2] == "15000"
        assert (await status(server.stub.Generate(request([1], 1), metadata=shown)))[2] == "15000"
        # Neither counts: a client may always abort its requests and list the models.
        assert (await status(server.stub.ListModels(pb.ListModelsRequest(), metadata=shown)))[
            0
        ] == "OK"
        aborted = server.stub.Abort(pb.AbortRequest(request_id="x"), metadata=shown)
        assert (await status(aborted))[0] == "OK"
        # Limits do not apply to calls with the token.
        for _ in range(6):
            assert (await status(server.stub.Tokenize(text, metadata=PEER.metadata)))[0] == "OK"


async def test_a_request_of_a_key_that_resumes_has_not_moved(tmp_path: Path) -> None:
    async with opened(tmp_path, ada=ANY) as server:
        server.stack.workers[0].step_seconds = 0.02
        wanted = request([1], 50, request_id="r", resume_token_ids=[5, 6])
        call = server.stub.Generate(wanted, metadata=server.shows("ada"))
        await call.read()
        [mine] = server.stack.engine.endings.open.named("r", "ada")
        assert not mine.moved
        gateways = server.stub.Generate(wanted, metadata=PEER.metadata)
        await gateways.read()
        [its] = server.stack.engine.endings.open.named("r", "")
        assert its.moved


async def test_bounds_on_all_calls_with_keys(tmp_path: Path) -> None:
    config = SchedulerConfig(max_open_requests=2, max_body_bytes=300, max_open_body_bytes=400)
    async with opened(tmp_path, config=config, ada=ANY) as server:
        server.stack.workers[0].step_seconds = 0.02
        shown = server.shows("ada")
        large = request([1], 100, cache_salt="x" * 230)
        first = server.stub.Generate(large, metadata=shown)
        await first.read()
        assert (
            "larger than 300 bytes"
            in (
                await status(
                    server.stub.Generate(request([1], 1, cache_salt="x" * 300), metadata=shown)
                )
            )[1]
        )
        full = await status(server.stub.Generate(large, metadata=shown))
        assert (full[0], full[2]) == ("RESOURCE_EXHAUSTED", "1000")
        assert "have messages of" in full[1]
        second = server.stub.Generate(request([1], 100), metadata=shown)
        await second.read()
        many = await status(server.stub.ListModels(pb.ListModelsRequest(), metadata=shown))
        assert many[0] == "RESOURCE_EXHAUSTED"
        assert "2 calls are being answered already" in many[1]
        assert (await statuses(server.stub, PEER.metadata))["ListModels"] == "OK"
        first.cancel()
        second.cancel()
        account = server.account("ada")
        await eventually(lambda: account.open == 0)
        assert (await status(server.stub.Generate(large, metadata=shown)))[0] == "OK"


async def test_a_message_that_never_arrives_costs_its_own_key_only(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, ada=RateLimits(10, None, 2), bob=ANY) as server:
        shown = server.shows("ada")
        reader = server.channel.stream_stream(f"{PATH}Generate")
        waiting = [reader(metadata=shown) for _ in range(2)]
        account = server.account("ada")
        await eventually(lambda: account.open == 2)
        assert (await status(server.stub.Generate(request([1], 1), metadata=shown)))[2] == "1000"
        assert len(await server.generate("bob", request([1], 3))) == 3
        waiting[0].cancel()
        await waiting[1].done_writing()
        code, details, _ = await status(waiting[1])
        assert (code, details) == ("INVALID_ARGUMENT", "the call has no message")
        await eventually(lambda: account.open == account.running == 0)
        assert len(await server.generate("ada", request([1], 3))) == 3
        assert account.requests is not None
        assert account.requests.level(0.0) == 10 - 3


async def test_a_beam_search_that_is_cancelled_pays_for_the_beams_so_far(tmp_path: Path) -> None:
    async with opened(tmp_path, ada=RateLimits(tokens_per_minute=LIMIT)) as server:
        server.stack.workers[0].step_seconds = 0.02
        wanted = request([1, 2, 3], 100, beam_search=pb.BeamSearch(width=3, num_returned=2))
        call = server.stub.Generate(wanted, metadata=server.shows("ada"))
        account = server.account("ada")
        await eventually(lambda: account.charged == 3 + 2 * 100)
        steps = server.stack.workers[0].steps
        await eventually(lambda: server.stack.workers[0].steps > steps + 10)
        call.cancel()
        await eventually(lambda: account.open == 0)
        rounds, rest = divmod(account.charged - 3, 2)
        assert 2 <= rounds < 80
        assert rest == 0
        await server.stack.settle()


KINDS = ("whole", "cancelled", "late", "invalid", "garbage", "silent", "failing", "text")


@pytest.mark.parametrize("seed", range(3))
async def test_keys_are_charged_for_the_tokens_used(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    limits = RateLimits(LIMIT, LIMIT)
    async with opened(tmp_path, ada=limits, bob=RateLimits(LIMIT, 400, 3)) as server:
        worker = server.stack.workers[0]
        worker.step_seconds, worker.retryable = 0.002, False
        worker.failing = dict.fromkeys(range(90, 99), 10**6)
        used: Counter[str] = Counter()
        kept = server.stack.engine.endings.open.close

        def noted(open_request: Any, state: Any, finish: pb.Finish) -> None:
            kept(open_request, state, finish)
            if open_request.queue_seconds is not None:
                usage = finish.usage
                used[open_request.owner] += usage.prompt_tokens + usage.completion_tokens

        server.stack.engine.endings.open.close = noted  # type: ignore[method-assign]
        outcomes: Counter[str] = Counter()
        heads: Counter[str] = Counter()
        unsure: Counter[str] = Counter()

        async def one(name: str, kind: str) -> None:
            heads[name] += 1
            shown = server.shows(name)
            prompt = [rng.randrange(80) for _ in range(rng.randint(1, 60))]
            if kind == "failing":
                prompt[0] = 91
            wanted = request(prompt, rng.randint(1, 60))
            if kind == "late":
                wanted.deadline_ms = rng.randint(1, 40)
            elif kind == "invalid":
                wanted.sampling.temperature = 9
            elif kind == "text":
                wanted.prompt = "Hello, how are you? " * rng.randint(1, 3)
                if rng.random() < 0.5:
                    wanted.stop.ClearField("max_tokens")
            if kind in ("garbage", "silent"):
                call = server.channel.stream_stream(f"{PATH}Generate")(metadata=shown)
                if kind == "garbage":
                    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                        await call.write(b"\xff")
                else:
                    await asyncio.sleep(0.01)
                    call.cancel()
            else:
                call = server.stub.Generate(wanted, metadata=shown)
            if kind == "cancelled":
                reads = rng.randint(0, 8)
                unsure[name] += reads == 0  # it may be cancelled before it is sent
                for _ in range(reads):
                    with suppress(grpc.aio.AioRpcError):
                        await call.read()
                call.cancel()
            try:
                outcomes[(await status(call))[0]] += 1
            except asyncio.CancelledError:
                outcomes["CANCELLED"] += 1

        async def client() -> None:
            for _ in range(25):
                await one(rng.choice(("ada", "bob")), rng.choice(KINDS))

        await asyncio.gather(*(client() for _ in range(6)))
        ada, bob = server.account("ada"), server.account("bob")
        await eventually(lambda: ada.open == bob.open == 0)
        await server.stack.settle()
        assert (ada.running, bob.running) == (0, 0)
        assert ada.charged == used["ada"] > 0
        assert bob.charged == used["bob"] > 0
        for account in (ada, bob):
            assert account.tokens is not None
            assert account.tokens.level(0.0) == account.tokens.per_minute - account.charged
        assert ada.requests is not None
        counted = LIMIT - ada.requests.level(0.0)
        assert heads["ada"] - unsure["ada"] <= counted <= heads["ada"]
        assert outcomes.keys() >= {
            "OK",
            "CANCELLED",
            "INVALID_ARGUMENT",
            "DEADLINE_EXCEEDED",
            "INTERNAL",
            "RESOURCE_EXHAUSTED",
        }, outcomes


async def test_prompts_without_output_are_charged(tmp_path: Path) -> None:
    info = worker_info()
    info.pooling.task, info.pooling.size, info.pooling.activation = "embed", 4, "none"
    info.pooling.pair_format = "tokenizer"
    message = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[1, 2, 3, 4, 5, 6]),
        pooling=pb.PoolingParams(task=pb.POOLING_TASK_EMBED),
    )
    limits = RateLimits(tokens_per_minute=10)
    async with opened(tmp_path, info=info, limited=limits) as scheduler:
        shown = scheduler.shows("limited")
        answer = await scheduler.stub.Pool(message, metadata=shown)
        assert answer.usage.prompt_tokens == 6
        name, details, _ = await status(scheduler.stub.Pool(message, metadata=shown))
        assert name == "RESOURCE_EXHAUSTED"
        assert "tokens" in details
        name, _, _ = await status(scheduler.stub.Pool(message))
        assert name == "UNAUTHENTICATED"
