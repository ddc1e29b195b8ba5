"""The routes of requests when schedulers refuse them, are lost, or return."""

import socket

import pytest

from pagewire.addresses import Address, parse_addresses
from pagewire.errors import Code, RequestError
from pagewire.gateway.errors import ApiError
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing import schedulers as schedulers_module
from pagewire.gateway.routing.schedulers import Schedulers
from support.scripted.routing import (
    Connect,
    all_ended,
    assert_complete,
    candidates_of_a_prompt,
    more_messages,
    scripted_generation,
    scripted_tokens,
)
from support.scripted.scripted_scheduler import MODEL, ScriptedScheduler
from support.waiting import eventually


async def test_a_request_refused_by_a_draining_scheduler_goes_to_another(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """The request is sent before the gateway receives the drain."""
    peers[1].waiting = 50
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = scripted_generation()
    schedulers.submit([run])
    peers[0].draining = True
    await all_ended([run], 5)
    assert [len(peer.submitted) for peer in peers] == [1, 1]
    assert_complete([run])


async def test_a_request_refused_by_a_full_queue_goes_to_another(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[1].waiting, peers[0].full_for = 50, 2.5
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = scripted_generation()
    schedulers.submit([run])
    await all_ended([run], 5)
    assert_complete([run])
    peers[1].full_for = 1.5
    refused = scripted_generation()
    schedulers.submit([refused])
    await all_ended([refused], 5)
    assert refused.failure is not None
    assert refused.failure.code == Code.RESOURCE_EXHAUSTED
    assert ApiError.of(refused.failure).headers == {"retry-after": "2"}


async def test_retry_after_is_given_while_every_ready_scheduler_refuses(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(*[await peer.start() for peer in peers])
    peers[0].retry_after = 9
    await eventually(lambda: any(s.load.retry_after_seconds for s in schedulers.links.values()))
    assert schedulers.retry_after == 0, "the other scheduler accepts them"
    peers[1].retry_after = 4
    await eventually(lambda: schedulers.retry_after == 4)
    peers[1].draining = True
    await eventually(lambda: schedulers.retry_after == 9)
    peers[0].ready_workers = 0
    await eventually(lambda: not schedulers.ready)
    assert schedulers.retry_after == 0, "they wait for the workers"


async def test_a_request_refused_by_the_only_scheduler_fails(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start(), resume_seconds=0.3)
    run = scripted_generation()
    schedulers.submit([run])
    peers[0].draining = True
    await all_ended([run], 5)
    assert run.failure is not None
    assert run.failure.code == Code.UNAVAILABLE


async def test_an_unknown_model_and_a_missing_scheduler_are_errors(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start(), resume_seconds=0.2)
    with pytest.raises(RequestError) as unknown:
        schedulers.model("other")
    assert unknown.value.code == Code.NOT_FOUND
    assert schedulers.model(None).id == MODEL
    peers[0].ready_workers = 0
    await eventually(lambda: not schedulers.ready)
    run = scripted_generation()
    schedulers.submit([run])
    await all_ended([run], 5)
    assert run.failure is not None
    assert run.failure.code == Code.UNAVAILABLE
    peers[1].model = "second"
    both = await connect(await peers[1].start())
    with pytest.raises(RequestError) as missing:
        both.model(MODEL)
    assert missing.value.code == Code.NOT_FOUND


async def test_a_new_request_waits_for_a_worker(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start())
    peers[0].ready_workers = 0
    await eventually(lambda: not schedulers.ready)
    run = scripted_generation()
    schedulers.submit([run])
    await more_messages(schedulers)
    assert peers[0].submitted == []
    peers[0].ready_workers = 1
    await all_ended([run], 5)
    assert_complete([run])
    assert peers[0].submitted == [run.request], "it was not sent before, so nothing is resumed"


async def test_requests_of_a_lost_scheduler_resume_elsewhere(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step, peers[1].waiting = 0.01, 50
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = scripted_generation(tokens=60)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    await peers[0].stop()
    await all_ended([run], 5)
    assert_complete([run])
    (resumed,) = peers[1].submitted
    assert len(resumed.resume_token_ids) >= 5
    assert resumed.request_id != peers[0].submitted[0].request_id


async def test_a_request_that_is_handed_back_resumes_elsewhere(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """With its tokens and with its prompt's other candidates. It does not become a suspect."""
    peers.append(ScriptedScheduler())
    for peer in peers:
        peer.step = 0.01
    peers[1].waiting = peers[2].waiting = 50
    schedulers = await connect(*[await peer.start() for peer in peers])
    candidates = candidates_of_a_prompt(5, tokens=60)
    schedulers.submit(candidates)
    await eventually(lambda: all(len(each.tokens) > 5 for each in candidates))
    peers[0].unable, peers[0].ready_workers = True, 0
    await all_ended(candidates)
    assert_complete(candidates)
    assert [len(peer.submitted) for peer in peers[:1]] == [5]
    assert sorted(len(peer.submitted) for peer in peers[1:]) == [0, 5]
    resumed = peers[1].submitted or peers[2].submitted
    assert all(len(each.resume_token_ids) >= 5 for each in resumed)
    assert [each.losses for each in candidates] == [0] * 5


async def test_a_request_handed_back_by_all_waits_for_a_worker(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """It is sent to each scheduler once, although they report workers."""
    peers[1].waiting = 50
    for peer in peers:
        peer.unable = True
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = scripted_generation()
    schedulers.submit([run])
    await eventually(lambda: [len(peer.submitted) for peer in peers] == [1, 1])
    await more_messages(schedulers)
    assert [len(peer.submitted) for peer in peers] == [1, 1], "it was sent again"
    assert not run.ended
    peers[1].unable, peers[1].ready_workers = False, 2
    await all_ended([run], 5)
    assert_complete([run])
    assert [len(peer.submitted) for peer in peers] == [1, 2]


async def test_a_request_that_is_handed_back_waits_for_a_limited_time(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step = 0.01
    schedulers = await connect(await peers[0].start(), resume_seconds=0.3)
    run = scripted_generation(tokens=500)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    peers[0].unable = True
    await all_ended([run], 5)
    assert run.failure is not None
    assert run.failure.code == Code.UNAVAILABLE
    assert len(peers[0].submitted) == 1


async def test_a_scheduler_without_a_worker_still_serves_its_model(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """After a restart new requests wait, even if the scheduler then has another address."""
    address = await peers[0].start()
    schedulers = await connect(address)
    await peers[0].stop()
    await eventually(lambda: not schedulers.ready)
    peers[0].knows_model, peers[0].ready_workers = False, 0
    await peers[0].start(address)
    [link] = schedulers.links.values()
    await eventually(lambda: link.connected)
    assert schedulers.model(MODEL).id == MODEL
    with pytest.raises(RequestError) as unknown:
        schedulers.model("other")
    assert unknown.value.code == Code.NOT_FOUND
    run = scripted_generation()
    schedulers.submit([run])
    await more_messages(schedulers)
    assert not run.ended
    peers[0].ready_workers = 1
    await all_ended([run], 5)
    assert_complete([run])
    del schedulers.links[address]
    assert schedulers.model(MODEL).id == MODEL
    schedulers.links[address] = link


async def test_before_any_model_is_known_requests_get_503() -> None:
    schedulers = Schedulers(parse_addresses("127.0.0.1:1"), GatewayMetrics())
    with pytest.raises(RequestError) as early:
        schedulers.model(MODEL)
    refusal = ApiError.of(early.value)
    assert (refusal.status, refusal.headers) == (503, {"retry-after": "1"})


async def test_a_request_waits_for_its_lost_scheduler(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step = 0.01
    address = await peers[0].start()
    schedulers = await connect(address)
    run = scripted_generation(tokens=60)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    await peers[0].stop()
    await eventually(lambda: not schedulers.ready)
    assert not run.ended
    await peers[0].start(address)
    await all_ended([run], 5)
    assert_complete([run])


async def test_a_request_waits_for_its_lost_scheduler_for_a_limited_time(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step = 0.01
    schedulers = await connect(await peers[0].start(), resume_seconds=0.2)
    run = scripted_generation(tokens=500)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    await peers[0].stop()
    await all_ended([run], 5)
    assert run.failure is not None
    assert run.failure.code == Code.UNAVAILABLE


async def test_a_deadline_still_holds_after_a_lost_scheduler(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step, peers[1].waiting = 0.01, 50
    schedulers = await connect(*[await peer.start() for peer in peers])
    moved, awaiting = scripted_generation(tokens=60), scripted_generation(tokens=500)
    moved.request.deadline_ms, awaiting.request.deadline_ms = 5000, 1000
    schedulers.submit([moved])
    schedulers.submit([awaiting])
    await eventually(lambda: len(moved.tokens) > 5)
    peers[1].step = 0.05
    await peers[0].stop()
    await eventually(lambda: len(peers[1].submitted) == 2)
    assert 3000 < peers[1].submitted[0].deadline_ms < 4990
    await peers[1].stop()
    await all_ended([awaiting], 3)
    assert awaiting.failure is not None
    assert awaiting.failure.code == Code.DEADLINE_EXCEEDED


async def test_names_are_resolved_again(
    monkeypatch: pytest.MonkeyPatch, peers: list[ScriptedScheduler]
) -> None:
    monkeypatch.setattr(schedulers_module, "RESOLVE_SECONDS", 0.05)
    first, second = [await peer.start() for peer in peers]
    answers: list[str] | None = [first]
    failures = 0

    async def dns(address: Address) -> list[str]:
        nonlocal failures
        assert address.host == "schedulers"
        if answers is None:
            failures += 1
            raise socket.gaierror("no such name")
        return answers

    schedulers = Schedulers(parse_addresses("schedulers:1"), GatewayMetrics(), dns)
    await schedulers.start()
    await eventually(lambda: schedulers.ready)
    answers = None
    await eventually(lambda: failures > 2)
    assert schedulers.ready, "a failing name server ends nothing"
    peers[0].step = 0.02
    run = scripted_generation(tokens=30)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 0)
    answers = [second]
    await eventually(lambda: second in schedulers.links and schedulers.links[second].ready)
    late = scripted_generation()
    schedulers.submit([late])
    await all_ended([late], 5)
    assert len(peers[1].submitted) == 1, "a vanished address takes no new requests"
    await all_ended([run], 5)
    assert run.tokens.tolist() == scripted_tokens("hi", 30), "but it finishes those it has"
    await eventually(lambda: set(schedulers.links) == {second})
    await schedulers.close()
