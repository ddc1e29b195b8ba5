"""Traces of real processes: one for each request, also when a worker is killed."""

import asyncio
import signal
from collections.abc import AsyncIterator
from itertools import pairwise

import grpc
import httpx
import pytest
import pytest_asyncio

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.fleet import SIMULATED, Fleet, running_fleet
from support.processes.otlp_receiver import ReceivedSpan, Receiver, otlp_receiver, tree
from support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENT = "b7ad6b7169203331"
TOKENS = 400


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def receiver() -> AsyncIterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(receiver: Receiver) -> AsyncIterator[Fleet]:
    """Two workers whose memory holds 1,024 tokens each, a scheduler and a gateway, all traced."""
    flags = (f"--otlp-endpoint={receiver.endpoint}",)
    async with running_fleet(
        workers=2,
        worker_command=(*SIMULATED, "--num-blocks=65", "--max-model-len=1024", *flags),
        scheduler_flags=flags,
        gateway_flags=flags,
        proxied=False,
    ) as fleet:
        yield fleet


def headers(trace: str, flags: str = "01") -> dict[str, str]:
    """The W3C headers of a client."""
    return {"traceparent": f"00-{trace}-{CLIENT}-{flags}", "tracestate": "vendor=x"}


async def complete(fleet: Fleet, trace: str, tokens: int = TOKENS, flags: str = "01") -> None:
    body = {"prompt": [5] * 20, "max_tokens": tokens, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=90) as client:
        answer = await client.post("/v1/completions", json=body, headers=headers(trace, flags))
    assert answer.json()["usage"]["completion_tokens"] == tokens, answer.text


async def spans_of(receiver: Receiver, trace: str, service: str) -> list[ReceivedSpan]:
    """The spans of a trace, once those of a service have been received."""
    await eventually(
        lambda: any(span.service == f"pagewire-{service}" for span in receiver.trace(trace)), 20
    )
    await asyncio.sleep(1.5)  # the other processes export within a second
    return receiver.trace(trace)


def named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == name]


async def test_a_request_that_survives_a_kill_is_one_trace(
    fleet: Fleet, receiver: Receiver
) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    request = asyncio.create_task(complete(fleet, trace))
    in_use = r"pagewire_worker_tokens_total\{phase=\"decode\"\}"
    await eventually(lambda: any(fleet.metric(f"worker-{n}", in_use) > 20 for n in (0, 1)), 30)
    [victim] = [n for n in (0, 1) if fleet.metric(f"worker-{n}", in_use) > 0]
    fleet.signal(f"worker-{victim}", signal.SIGKILL)
    await request
    spans = await spans_of(receiver, trace, "worker")
    print(tree(spans))

    [gateway] = named(spans, "POST /v1/completions")
    assert (gateway.service, gateway.parent, gateway.state) == (
        "pagewire-gateway",
        CLIENT,
        "vendor=x",
    )
    assert gateway.attributes["http.response.status_code"] == 200
    assert gateway.attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert [event.name for event in gateway.events] == ["first token"]

    [scheduler] = named(spans, "scheduler")
    assert (scheduler.parent, scheduler.state) == (gateway.id, "vendor=x")
    assert [event.name for event in scheduler.events] == ["worker lost", "resumed"]
    lost, resumed = scheduler.events
    assert lost.attributes["pagewire.worker"] != resumed.attributes["pagewire.worker"]
    assert 20 <= resumed.attributes["pagewire.tokens"] < TOKENS

    phases = [span for span in spans if span.parent == scheduler.id and span.name != "worker"]
    assert [(span.name, span.attributes["pagewire.attempt"]) for span in phases] == [
        ("queue", 1),
        ("prefill", 1),
        ("decode", 1),
        ("queue", 2),
        ("prefill", 2),
        ("decode", 2),
    ]
    for phase, following in pairwise(phases):
        assert abs(phase.end - following.start) < 20e6, "phases follow each other"

    # The first worker's span ended with its process.
    [worker] = named(spans, "worker")
    assert (worker.service, worker.parent) == ("pagewire-worker", scheduler.id)
    generated = worker.attributes["pagewire.generated_tokens"]
    assert generated == resumed.attributes["pagewire.tokens"]
    assert worker.attributes["pagewire.steps"] >= TOKENS - generated
    assert phases[-2].start <= worker.start <= phases[-1].start
    assert len(spans) == 9, "spans cost by the events of a request, not by its tokens"
    await fleet.until_restarted(f"worker-{victim}", since=0)


async def test_preemptions_are_events(fleet: Fleet, receiver: Receiver) -> None:
    traces = [f"{n:032x}" for n in range(1, 9)]
    await asyncio.gather(*(complete(fleet, trace) for trace in traces))
    for trace in traces:
        await spans_of(receiver, trace, "worker")
    schedulers = [named(receiver.trace(trace), "scheduler")[0] for trace in traces]
    preempted = [s for s in schedulers if any(e.name == "preempted" for e in s.events)]
    assert preempted, "the memory does not hold all"
    for span in preempted:
        names = [event.name for event in span.events]
        assert names == ["preempted", "resumed"] * (len(names) // 2)
        spans = receiver.trace(span.trace)
        attempts = span.attributes["pagewire.attempts"]
        assert len(named(spans, "worker")) == attempts == len(names) // 2 + 1
        assert len(named(spans, "prefill")) == attempts


async def test_the_context_in_grpc_metadata_is_taken(fleet: Fleet, receiver: Receiver) -> None:
    trace = "1" * 32
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5] * 20))
    request.stop.max_tokens = 4
    async with grpc.aio.insecure_channel(fleet.schedulers[0]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        async for _ in stub.Generate(request, metadata=tuple(headers(trace).items())):
            pass
    spans = await spans_of(receiver, trace, "worker")
    [scheduler], [worker] = named(spans, "scheduler"), named(spans, "worker")
    assert scheduler.parent == CLIENT
    assert worker.parent == scheduler.id


async def test_a_trace_that_the_client_does_not_record_has_no_spans(
    fleet: Fleet, receiver: Receiver
) -> None:
    await complete(fleet, "2" * 32, tokens=3, flags="00")
    await complete(fleet, "3" * 32, tokens=3)
    await spans_of(receiver, "3" * 32, "worker")
    assert receiver.trace("2" * 32) == []


async def test_a_request_without_context_is_a_trace_of_its_own(
    fleet: Fleet, receiver: Receiver
) -> None:
    body = {"prompt": [5] * 20, "max_tokens": 2, "request_id": "alone"}
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=60) as client:
        await client.post("/v1/completions", json=body)
        assert (await client.post("/v1/completions", json={"prompt": ""})).status_code == 400

    def own() -> list[ReceivedSpan]:
        return [s for s in receiver.spans if s.attributes.get("pagewire.request_id") == "alone"]

    await eventually(lambda: bool(own()), 20)
    [gateway] = own()
    assert gateway.parent == ""
    spans = await spans_of(receiver, gateway.trace, "worker")
    assert {span.service for span in spans} == {
        f"pagewire-{s}" for s in ("gateway", "scheduler", "worker")
    }


async def test_spans_hold_nothing_that_a_client_wrote(fleet: Fleet, receiver: Receiver) -> None:
    mark, trace = "zanzibar-marker", "5" * 32
    async with httpx.AsyncClient(
        base_url=fleet.urls[0], timeout=60, headers=headers(trace)
    ) as client:
        body = {"prompt": mark, "max_tokens": 2, "stop": [mark], "user": mark}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await client.post("/v1/completions", json=body | {"model": mark})).is_error
        assert (await client.post("/v1/completions", json={mark: mark})).is_error
    async with grpc.aio.insecure_channel(fleet.schedulers[0]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(prompt=mark, model=mark)
        call = stub.Generate(request, metadata=tuple(headers(trace).items()))
        with pytest.raises(grpc.aio.AioRpcError, match=mark):
            await call.read()
    spans = await spans_of(receiver, trace, "worker")
    assert len(named(spans, "POST /v1/completions")) == 3
    assert [s.error for s in named(spans, "scheduler") if s.error] == ["error code 5"]
    assert mark not in str(spans)


async def test_a_request_that_survives_its_scheduler_is_one_trace(
    fleet: Fleet, receiver: Receiver
) -> None:
    trace, since = "4" * 32, len(fleet.log)
    steps = r"pagewire_worker_steps_total"
    before = sum(fleet.metric(f"worker-{n}", steps) for n in (0, 1))
    request = asyncio.create_task(complete(fleet, trace))
    await eventually(
        lambda: sum(fleet.metric(f"worker-{n}", steps) for n in (0, 1)) > before + 20, 30
    )
    fleet.signal("scheduler-0", signal.SIGKILL)
    await request
    await eventually(lambda: bool(named(receiver.trace(trace), "decode")), 20)
    await asyncio.sleep(1.5)
    spans = receiver.trace(trace)
    print(tree(spans))
    [gateway] = named(spans, "POST /v1/completions")
    assert sorted(event.name for event in gateway.events) == [
        "first token",
        "resumed",
        "scheduler lost",
    ]
    # The first scheduler's spans ended with its process, but not those of its worker.
    [scheduler] = named(spans, "scheduler")
    assert scheduler.parent == gateway.id
    first, second = named(spans, "worker")
    assert [event.name for event in first.events] == ["stream ended"]
    assert second.parent == scheduler.id
    assert second.attributes["pagewire.generated_tokens"] > 0
    await fleet.until_restarted("scheduler-0", since=since)
