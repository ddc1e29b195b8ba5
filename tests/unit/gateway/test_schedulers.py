"""Which scheduler takes a request, and what becomes of it when schedulers come and go."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from pagewire.addresses import Address, parse_addresses, resolve
from pagewire.errors import Code, RequestError
from pagewire.gateway.errors import ApiError
from pagewire.gateway.generation.generation import Generation, Mailbox
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing import schedulers as schedulers_module
from pagewire.gateway.routing.link import Link
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.suspicion import Loss
from pagewire.v1 import inference_pb2 as pb
from support.clients.failing_calls import fails_when_cancelled
from support.scripted.scripted_scheduler import MODEL, ScriptedScheduler, token_at
from support.waiting import eventually


def generation(prompt: str = "hi", tokens: int = 8, model: str = MODEL) -> Generation:
    request = pb.GenerateRequest(
        request_id="r",
        model=model,
        prompt=prompt,
        sampling=pb.SamplingParams(seed=3),
        stop=pb.StopConditions(max_tokens=tokens),
    )
    return Generation(request, 0, 0, Mailbox(), eager=False)


def tokens_of(prompt: str, count: int) -> list[int]:
    return [token_at(prompt, 3, i) for i in range(count)]


Connect = Callable[..., "asyncio.Future[Schedulers]"]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    opened: list[Schedulers] = []

    async def open_schedulers(*addresses: str, resume_seconds: float = 5.0) -> Schedulers:
        schedulers = Schedulers(
            parse_addresses(",".join(addresses)), GatewayMetrics(), resume_seconds=resume_seconds
        )
        opened.append(schedulers)
        await schedulers.start()
        await eventually(lambda: all(link.ready for link in schedulers.links.values()))
        return schedulers

    yield open_schedulers
    for schedulers in opened:
        await schedulers.close()


@pytest.fixture
async def peers() -> AsyncIterator[list[ScriptedScheduler]]:
    peers = [ScriptedScheduler(), ScriptedScheduler()]
    yield peers
    for peer in peers:
        await peer.stop()


async def test_least_loaded_gets_the_request(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].waiting = 5
    peers[0].step = peers[1].step = 0.02
    schedulers = await connect(*[await peer.start() for peer in peers])
    for _ in range(9):
        schedulers.submit([generation()])
    await eventually(lambda: sum(len(peer.submitted) for peer in peers) == 9)
    assert [len(peer.submitted) for peer in peers] == [2, 7], "5 + 2 and 7 are level"


async def test_load_is_counted_for_each_worker(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].waiting, peers[0].ready_workers = 6, 3
    peers[1].waiting, peers[1].ready_workers = 4, 1
    schedulers = await connect(*[await peer.start() for peer in peers])
    schedulers.submit([generation()])
    await eventually(lambda: len(peers[0].submitted) == 1)


async def test_draining_scheduler_is_left_out(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(*[await peer.start() for peer in peers])
    peers[0].draining = True
    await eventually(lambda: any(link.draining for link in schedulers.links.values()))
    for _ in range(4):
        schedulers.submit([generation()])
    await eventually(lambda: len(peers[1].submitted) == 4)
    assert peers[0].submitted == []


async def test_a_scheduler_that_falls_silent_is_lost(
    connect: Connect, peers: list[ScriptedScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gateway.routing.link.HEARTBEAT_SECONDS", 0.1)
    peers[1].waiting = 50
    peers[0].step = 0.02
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = generation(tokens=40)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    peers[0].mute = True
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert [len(peer.submitted) for peer in peers] == [1, 1]
    assert run.tokens.tolist() == tokens_of("hi", 40)
    peers[0].mute = False
    await eventually(lambda: all(link.ready for link in schedulers.links.values()))


async def test_a_scheduler_that_does_not_read_is_lost(
    connect: Connect, peers: list[ScriptedScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a damaged length makes it wait for the rest of a message."""
    monkeypatch.setattr("pagewire.gateway.routing.link.HEARTBEAT_SECONDS", 0.1)
    peers[1].waiting = 50
    peers[0].step = peers[1].step = 0.02
    peers[0].read = 0
    schedulers = await connect(*[await peer.start() for peer in peers])
    await asyncio.sleep(1.5)
    assert all(link.ready for link in schedulers.links.values()), "nothing was to be read"
    run = generation(tokens=200)
    schedulers.submit([run])
    await asyncio.wait_for(run.mailbox.take(), 10)
    assert [len(peer.submitted) for peer in peers] == [1, 1]
    assert run.tokens.tolist() == tokens_of("hi", 200)


async def test_refused_by_one_goes_to_another(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """The request crosses the announcement of the drain on its way."""
    peers[1].waiting = 50
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = generation()
    schedulers.submit([run])
    peers[0].draining = True
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert [len(peer.submitted) for peer in peers] == [1, 1]
    assert run.tokens.tolist() == tokens_of("hi", 8)


async def test_a_full_queue_sends_it_to_another(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[1].waiting, peers[0].full_for = 50, 2.5
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = generation()
    schedulers.submit([run])
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.tokens.tolist() == tokens_of("hi", 8)
    peers[1].full_for = 1.5
    refused = generation()
    schedulers.submit([refused])
    await asyncio.wait_for(refused.mailbox.take(), 5)
    assert refused.failure is not None
    assert refused.failure.code == Code.RESOURCE_EXHAUSTED
    assert ApiError.of(refused.failure).headers == {"retry-after": "2"}


async def test_new_requests_are_refused_while_every_ready_scheduler_does(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(*[await peer.start() for peer in peers])
    peers[0].retry_after = 9
    await eventually(lambda: any(s.load.retry_after_seconds for s in schedulers.links.values()))
    assert schedulers.retry_after == 0, "the other one takes them"
    peers[1].retry_after = 4
    await eventually(lambda: schedulers.retry_after == 4)
    peers[1].draining = True
    await eventually(lambda: schedulers.retry_after == 9)
    peers[0].ready_workers = 0
    await eventually(lambda: not schedulers.ready)
    assert schedulers.retry_after == 0, "they wait for the return of the workers"


async def test_a_scheduler_hears_what_was_taken_before(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step = 0.02
    schedulers = await connect(await peers[0].start())
    await peers[1].start()
    schedulers.submit([generation()])
    await eventually(lambda: peers[0].moved == [False])
    peers[0].ready_workers = 0
    await eventually(lambda: not schedulers.ready)
    late = generation("late")
    schedulers.submit([late])
    peers[0].ready_workers = 1
    await asyncio.wait_for(late.mailbox.take(), 5)
    assert peers[0].moved == [False, True]


async def test_refused_by_the_only_one_fails(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start(), resume_seconds=0.3)
    await peers[1].start()
    run = generation()
    schedulers.submit([run])
    peers[0].draining = True
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.failure is not None
    assert run.failure.code == Code.UNAVAILABLE


async def test_unknown_model_and_no_scheduler(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start(), resume_seconds=0.2)
    with pytest.raises(RequestError) as unknown:
        schedulers.model("other")
    assert unknown.value.code == Code.NOT_FOUND
    assert schedulers.model(None).id == MODEL
    peers[0].ready_workers = 0
    await eventually(lambda: not schedulers.ready)
    run = generation()
    schedulers.submit([run])
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.failure is not None
    assert run.failure.code == Code.UNAVAILABLE
    peers[1].model = "second"
    both = await connect(await peers[1].start())
    with pytest.raises(RequestError) as missing:
        both.model(MODEL)
    assert missing.value.code == Code.NOT_FOUND


async def test_choices_of_a_prompt_stay_together(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """Their scheduler shares the KV of their prompt, at first and after one was lost."""
    peers.append(ScriptedScheduler())
    for peer in peers:
        peer.step = 0.01
    schedulers = await connect(*[await peer.start() for peer in peers])
    request, mailbox = generation("hi", 60).request, Mailbox()
    family = [Generation(request, i, 0, mailbox, eager=False) for i in range(5)]
    schedulers.submit(family)
    await eventually(lambda: all(len(run.tokens) > 5 for run in family))
    assert sorted(len(peer.submitted) for peer in peers) == [0, 0, 5]
    first = next(peer for peer in peers if peer.submitted)
    await first.stop()
    await eventually(lambda: all(run.ended for run in family))
    assert sorted(len(peer.submitted) for peer in peers) == [0, 5, 5]
    assert all(run.tokens.tolist() == tokens_of("hi", 60) for run in family)
    await first.start()


async def test_a_new_request_waits_for_a_worker(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start())
    await peers[1].start()
    peers[0].ready_workers = 0
    await eventually(lambda: not schedulers.ready)
    run = generation()
    schedulers.submit([run])
    await asyncio.sleep(0.1)
    assert peers[0].submitted == []
    peers[0].ready_workers = 1
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.tokens.tolist() == tokens_of("hi", 8)
    assert peers[0].submitted == [run.request], "it was never sent before: no attempt to resume"


async def test_lost_scheduler_is_resumed_elsewhere(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step, peers[1].waiting = 0.01, 50
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = generation(tokens=60)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    await peers[0].stop()
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.tokens.tolist() == tokens_of("hi", 60)
    (resumed,) = peers[1].submitted
    assert len(resumed.resume_token_ids) >= 5
    assert resumed.request_id != peers[0].submitted[0].request_id
    await peers[0].start()


async def test_what_is_handed_back_goes_on_elsewhere(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """With the tokens that it has, all choices of a prompt together, and nobody is blamed."""
    peers.append(ScriptedScheduler())
    for peer in peers:
        peer.step = 0.01
    peers[1].waiting = peers[2].waiting = 50
    schedulers = await connect(*[await peer.start() for peer in peers])
    request, mailbox = generation("hi", 60).request, Mailbox()
    family = [Generation(request, i, 0, mailbox, eager=False) for i in range(5)]
    schedulers.submit(family)
    await eventually(lambda: all(len(run.tokens) > 5 for run in family))
    peers[0].unable, peers[0].ready_workers = True, 0
    await eventually(lambda: all(run.ended for run in family))
    assert all(run.tokens.tolist() == tokens_of("hi", 60) for run in family)
    assert [len(peer.submitted) for peer in peers[:1]] == [5]
    assert sorted(len(peer.submitted) for peer in peers[1:]) == [0, 5]
    resumed = peers[1].submitted or peers[2].submitted
    assert all(len(each.resume_token_ids) >= 5 for each in resumed)
    assert [run.losses for run in family] == [0] * 5


async def test_what_is_handed_back_by_all_waits_for_a_worker_that_returns(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """It is asked of each scheduler once, though they say that they have workers."""
    peers[1].waiting = 50
    for peer in peers:
        peer.unable = True
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = generation()
    schedulers.submit([run])
    await eventually(lambda: [len(peer.submitted) for peer in peers] == [1, 1])
    await asyncio.sleep(0.5)
    assert [len(peer.submitted) for peer in peers] == [1, 1], "it goes to and fro"
    assert not run.ended
    peers[1].unable, peers[1].ready_workers = False, 2
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.tokens.tolist() == tokens_of("hi", 8)
    assert [len(peer.submitted) for peer in peers] == [1, 2]


async def test_the_next_scheduler_hears_of_workers_that_were_lost(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """As long as no token has come since."""
    peers[1].waiting, peers[0].step = 50, 0.01
    peers[0].tells = pb.WorkerLosses(workers=3, alone=[0.5])
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = generation(tokens=60)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    peers[0].unable, peers[1].step = True, 0.01
    held = len(run.tokens)
    await eventually(lambda: len(run.tokens) > held + 5)
    assert (peers[0].told, peers[1].told) == ([0], [3])
    peers[0].unable, peers[0].ready_workers = False, 2
    await eventually(lambda: all(link.ready for link in schedulers.links.values()))
    await peers[1].stop()
    await ended([run])
    assert peers[0].told == [0, 0]
    assert run.tokens.tolist() == tokens_of("hi", 60)
    await peers[1].start()


async def test_others_wait_once_more_while_suspects_are_tried(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    address = await peers[0].start()
    await peers[1].start()
    schedulers = await connect(address, resume_seconds=0.5)
    await peers[0].stop()
    await eventually(lambda: not schedulers.ready)
    suspect, other = generation("suspect"), generation("other")
    for _ in range(3):
        suspect.note_loss(Loss("before", True))
    began = asyncio.get_running_loop().time()
    for run in (suspect, other):
        schedulers._let_wait(run)
    schedulers._settle()
    await ended([other])
    assert 0.9 < asyncio.get_running_loop().time() - began < 2
    await ended([suspect])
    assert other.failure is not None
    assert other.failure.code == Code.UNAVAILABLE
    await peers[0].start(address)


async def test_what_is_handed_back_does_not_wait_for_ever(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step = 0.01
    schedulers = await connect(await peers[0].start(), resume_seconds=0.3)
    await peers[1].start()
    run = generation(tokens=500)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    peers[0].unable = True
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.failure is not None
    assert run.failure.code == Code.UNAVAILABLE
    assert len(peers[0].submitted) == 1


async def test_a_scheduler_that_returns_without_a_worker_still_serves_its_model(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """A node restarts: new requests wait, also where the scheduler has another address then."""
    address = await peers[0].start()
    await peers[1].start()
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
    run = generation()
    schedulers.submit([run])
    await asyncio.sleep(0.2)
    assert not run.ended
    peers[0].ready_workers = 1
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.tokens.tolist() == tokens_of("hi", 8)
    del schedulers.links[address]
    assert schedulers.model(MODEL).id == MODEL
    schedulers.links[address] = link


async def test_before_any_model_was_served_requests_come_back_later(
    peers: list[ScriptedScheduler],
) -> None:
    schedulers = Schedulers(parse_addresses("127.0.0.1:1"), GatewayMetrics())
    with pytest.raises(RequestError) as early:
        schedulers.model(MODEL)
    refusal = ApiError.of(early.value)
    assert (refusal.status, refusal.headers) == (503, {"retry-after": "1"})
    for peer in peers:
        await peer.start()


async def test_lost_scheduler_is_awaited(connect: Connect, peers: list[ScriptedScheduler]) -> None:
    peers[0].step = 0.01
    address = await peers[0].start()
    await peers[1].start()
    schedulers = await connect(address)
    run = generation(tokens=60)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    await peers[0].stop()
    await eventually(lambda: not schedulers.ready)
    assert not run.ended
    await peers[0].start(address)
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.tokens.tolist() == tokens_of("hi", 60)


async def test_lost_scheduler_is_not_awaited_for_ever(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step = 0.01
    schedulers = await connect(await peers[0].start(), resume_seconds=0.2)
    await peers[1].start()
    run = generation(tokens=500)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    await peers[0].stop()
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.failure is not None
    assert run.failure.code == Code.UNAVAILABLE
    await peers[0].start()


async def test_a_deadline_goes_on_when_the_scheduler_is_lost(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step, peers[1].waiting = 0.01, 50
    schedulers = await connect(*[await peer.start() for peer in peers])
    moved, awaiting = generation(tokens=60), generation(tokens=500)
    moved.request.deadline_ms, awaiting.request.deadline_ms = 5000, 1000
    schedulers.submit([moved])
    schedulers.submit([awaiting])
    await eventually(lambda: len(moved.tokens) > 5)
    peers[1].step = 0.05
    await peers[0].stop()
    await eventually(lambda: len(peers[1].submitted) == 2)
    assert 3000 < peers[1].submitted[0].deadline_ms < 4990
    await peers[1].stop()
    await asyncio.wait_for(awaiting.mailbox.take(), 3)
    assert awaiting.failure is not None
    assert awaiting.failure.code == Code.DEADLINE_EXCEEDED
    for peer in peers:
        await peer.start()


async def test_repeated_delta_is_dropped(connect: Connect, peers: list[ScriptedScheduler]) -> None:
    schedulers = await connect(await peers[0].start())
    await peers[1].start()
    run = generation("twice=2")
    schedulers.submit([run])
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.tokens.tolist() == tokens_of("twice=2", 8)


async def test_gap_fails_the_request_alone(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step = 0.01
    schedulers = await connect(await peers[0].start())
    await peers[1].start()
    broken, good = generation("skip=2"), generation()
    schedulers.submit([broken])
    schedulers.submit([good])
    await asyncio.wait_for(broken.mailbox.take(), 5)
    assert broken.failure is not None
    assert broken.failure.code == Code.INTERNAL
    await asyncio.wait_for(good.mailbox.take(), 5)
    assert good.tokens.tolist() == tokens_of("hi", 8)
    assert peers[0].aborted == ["r"]


async def test_names_are_resolved_again(
    monkeypatch: pytest.MonkeyPatch, peers: list[ScriptedScheduler]
) -> None:
    monkeypatch.setattr(schedulers_module, "RESOLVE_SECONDS", 0.05)
    first, second = [await peer.start() for peer in peers]
    answers: list[str] | None = [first]

    async def dns(address: Address) -> list[str]:
        assert address.host == "schedulers"
        if answers is None:
            raise socket.gaierror("no such name")
        return answers

    schedulers = Schedulers(parse_addresses("schedulers:1"), GatewayMetrics(), dns)
    await schedulers.start()
    await eventually(lambda: schedulers.ready)
    answers = None
    await asyncio.sleep(0.2)
    assert schedulers.ready, "a failing name server ends nothing"
    peers[0].step = 0.02
    run = generation(tokens=30)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 0)
    answers = [second]
    await eventually(lambda: second in schedulers.links and schedulers.links[second].ready)
    late = generation()
    schedulers.submit([late])
    await asyncio.wait_for(late.mailbox.take(), 5)
    assert len(peers[1].submitted) == 1, "a vanished address takes no new requests"
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.tokens.tolist() == tokens_of("hi", 30), "but finishes those it has"
    await eventually(lambda: set(schedulers.links) == {second})
    await schedulers.close()


async def test_abort_reaches_the_scheduler(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step = 0.01
    schedulers = await connect(await peers[0].start())
    await peers[1].start()
    run = generation(tokens=500)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 2)
    schedulers.abort(run)
    await eventually(lambda: peers[0].aborted == ["r"])
    await eventually(lambda: all(link.idle for link in schedulers.links.values()))


async def test_socket_file(
    connect: Connect, peers: list[ScriptedScheduler], tmp_path: Path
) -> None:
    schedulers = await connect(await peers[0].start(f"unix:{tmp_path}/scheduler.sock"))
    await peers[1].start()
    run = generation()
    schedulers.submit([run])
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert run.tokens.tolist() == tokens_of("hi", 8)


async def test_addresses() -> None:
    parsed = parse_addresses("a:1, [::1]:2 ,unix:/tmp/s,127.0.0.1:3")
    assert [(a.host, a.port) for a in parsed] == [("a", 1), ("::1", 2), ("", 0), ("127.0.0.1", 3)]
    assert [await resolve(a) for a in parsed[1:]] == [["[::1]:2"], ["unix:/tmp/s"], ["127.0.0.1:3"]]
    for bad in ("", ",", "host", "host:", ":5", "host:x", "host:70000", "host:0"):
        with pytest.raises(ValueError, match="scheduler"):
            parse_addresses(bad)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls take less time."""
    monkeypatch.setattr("pagewire.suspicion.SURVIVAL_SECONDS", 0.4)


async def ended(runs: Sequence[Generation], seconds: float = 30) -> None:
    await eventually(lambda: all(run.ended for run in runs), seconds)


def assert_innocent(runs: Sequence[Generation]) -> None:
    for run in runs:
        assert run.failure is None, run.failure
        assert run.tokens.tolist() == tokens_of(run.request.prompt, run.request.stop.max_tokens)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("count", [1, 2])
async def test_a_poison_fails_alone_after_a_bounded_number_of_losses(
    connect: Connect, peers: list[ScriptedScheduler], count: int
) -> None:
    for peer in peers:
        peer.deadly, peer.step = "poison", 0.01
    addresses = [await peer.start() for peer in peers]
    schedulers = await connect(*addresses[:count])
    innocent = [generation(f"innocent {number}", 60) for number in range(12)]
    poison = generation("poison")
    for run in (*innocent[:6], poison, *innocent[6:]):
        schedulers.submit([run])
    await ended([poison, *innocent])
    assert poison.failure is not None
    assert poison.failure.code == Code.INTERNAL
    assert "5 schedulers in a row were lost" in poison.failure.message
    assert "the last 2 with nothing else to do" in poison.failure.message
    assert_innocent(innocent)
    assert sum(peer.deaths for peer in peers) == 5
    alone = [open_ones for peer in peers for open_ones in peer.open_at_death]
    assert sorted(alone)[:2] == [1, 1]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("gateways", [1, 2])
async def test_two_poisons_at_once_fail_and_nobody_else(
    connect: Connect, peers: list[ScriptedScheduler], gateways: int
) -> None:
    peers[0].deadly, peers[0].step = "poison", 0.01
    await peers[1].start()
    address = await peers[0].start()
    doors = [await connect(address, resume_seconds=20.0) for _ in range(gateways)]
    poisons = [generation(f"poison {number}") for number in range(2)]
    innocent = [generation(f"innocent {number}", 60) for number in range(8)]
    for number, run in enumerate([*innocent[:4], *poisons, *innocent[4:]]):
        doors[number % gateways].submit([run])
    await ended([*poisons, *innocent], 40)
    for poison in poisons:
        assert poison.failure is not None
        assert poison.failure.code == Code.INTERNAL, poison.failure
    assert_innocent(innocent)
    # Each of them three in company, two alone, and some that make a trial of the other void.
    assert peers[0].deaths <= 2 * (3 + 2) + 2 * 3


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("seed", range(3))
async def test_innocents_survive_schedulers_that_end_again_and_again(
    connect: Connect, peers: list[ScriptedScheduler], seed: int
) -> None:
    """Long before a token of them: all become suspects, and are tried."""
    rng = random.Random(seed)
    for peer in peers:
        peer.step = 0.05
    schedulers = await connect(*[await peer.start() for peer in peers], resume_seconds=20.0)
    runs = [generation(f"run {number}", 10) for number in range(20)]
    for run in runs:
        for _ in range(3):
            run.note_loss(Loss("before", True))
        schedulers.submit([run])

    async def kill() -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.1, 0.6))
            await rng.choice(peers).die()

    killing = asyncio.create_task(kill())
    await asyncio.sleep(6)
    killing.cancel()
    await asyncio.gather(killing, return_exceptions=True)
    for peer in peers:
        await peer.stop()
        await peer.start(peer._address)
    await ended(runs, 30)
    assert_innocent(runs)


async def test_a_connection_that_breaks_is_no_loss(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """The same process answers again."""
    await peers[1].start()
    address = await peers[0].start()
    schedulers = await connect(address)
    peers[0].step = 60.0  # no token comes
    run = generation()
    schedulers.submit([run])
    for cuts in range(1, 8):
        await eventually(lambda cuts=cuts: len(peers[0].submitted) == cuts)
        await peers[0].cut()
        await eventually(lambda: run.losses == 1)
        peers[0].step = 60.0 if cuts < 7 else 0.01
        await peers[0].start(address)
        await eventually(lambda: run.losses == 0)
    await asyncio.wait_for(run.mailbox.take(), 5)
    assert_innocent([run])


async def test_a_scheduler_that_drains_is_no_loss(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    await peers[1].start()
    schedulers = await connect(await peers[0].start())
    peers[0].step = 0.05
    run = generation(tokens=500)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 1)
    peers[0].draining = True
    await eventually(lambda: any(link.draining for link in schedulers.links.values()))
    await peers[0].stop()
    await eventually(lambda: run.moved)
    assert run.losses == 0
    await peers[0].start()


async def test_suspects_are_tried_one_at_a_time_while_others_are_elsewhere(
    connect: Connect, peers: list[ScriptedScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gateway.routing.trials.TRIAL_SECONDS", 0.5)
    peers[0].step = peers[1].step = 0.05
    schedulers = await connect(*[await peer.start() for peer in peers])
    peers[1].waiting = 50
    await eventually(lambda: any(link.load.waiting for link in schedulers.links.values()))
    suspects = [generation(f"suspect {number}", 4) for number in range(3)]
    other = generation("other", 40)
    schedulers.submit([other])
    await eventually(lambda: len(other.tokens) > 2)
    for run in suspects:
        for _ in range(3):
            run.note_loss(Loss("before", True))
        schedulers._let_wait(run)
    schedulers._settle()
    await ended([other, *suspects])
    assert_innocent([other, *suspects])
    tried = [each.prompt for each in peers[0].submitted]
    assert tried[0] == "other"
    assert len(peers[1].submitted) >= 1, "the other one went there meanwhile"


@pytest.mark.usefixtures("soon")
async def test_a_scheduler_that_lives_with_a_suspect_clears_it(
    connect: Connect, peers: list[ScriptedScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gateway.routing.trials.TRIAL_SECONDS", 0.4)
    await peers[1].start()
    schedulers = await connect(await peers[0].start())
    run = generation("fail=13 fail_at=1", 500)  # so that the script gives it no token
    run.request.prompt = "hi"
    for _ in range(3):
        run.note_loss(Loss("before", True))
    schedulers._let_wait(run)
    peers[0].step = 0.8  # but it says something
    schedulers._settle()
    await eventually(lambda: run.losses == 0)


async def test_a_scheduler_that_is_never_alone_runs_suspects_among_others(
    connect: Connect, peers: list[ScriptedScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gateway.routing.trials.ASK_SECONDS", 0.3)
    await peers[1].start()
    schedulers = await connect(await peers[0].start())
    peers[0].grants, peers[0].step = False, 0.02
    run = generation()
    for _ in range(3):
        run.note_loss(Loss("before", True))
    schedulers._let_wait(run)
    schedulers._settle()
    for _ in range(40):
        peers[0].waiting += 1  # news, as there always are
        await asyncio.sleep(0.02)
    await ended([run])
    assert_innocent([run])


async def test_a_suspect_that_is_handed_back_goes_on_where_a_worker_is(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(*[await peer.start() for peer in peers])
    peers[0].unable = True
    peers[1].waiting = 50
    await eventually(lambda: any(link.load.waiting for link in schedulers.links.values()))
    run = generation()
    for _ in range(3):
        run.note_loss(Loss("before", True))
    schedulers._let_wait(run)
    schedulers._settle()
    await ended([run])
    assert_innocent([run])


async def test_links_close_whose_calls_fail_when_they_are_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Link, "_session", fails_when_cancelled)
    schedulers = Schedulers(parse_addresses("127.0.0.1:1"), GatewayMetrics(), resume_seconds=1.0)
    await schedulers.start()
    await asyncio.sleep(0.01)
    await asyncio.wait_for(schedulers.close(), 5)


def test_a_token_clears_of_suspicion() -> None:
    run = generation()
    for losses in (1, 2, 3):
        run.note_loss(Loss("process", True))
        assert run.losses == losses
    run.extend(b"\1\0\0\0", b"x", 0.0)
    assert run.losses == 0
    run.note_loss(Loss("process", True))
    assert run.losses == 1
