"""Several models: one without schedulers, or with full ones, does not affect the others."""

import asyncio

import pytest

from pagewire.addresses import Address, parse_addresses
from pagewire.errors import Code, RequestError
from pagewire.gateway.errors import ApiError
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.suspicion import Loss
from support.scripted.routing import (
    Connect,
    all_ended,
    assert_complete,
    scripted_generation,
    suspect,
)
from support.scripted.scripted_scheduler import MODEL, ScriptedScheduler
from support.waiting import eventually

OTHER = "second"


@pytest.fixture
def both(peers: list[ScriptedScheduler]) -> list[ScriptedScheduler]:
    """Schedulers of MODEL and of OTHER."""
    peers[1].model = OTHER
    return peers


async def test_requests_go_to_the_scheduler_of_their_model(
    connect: Connect, both: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(*[await peer.start() for peer in both])
    assert schedulers.models().keys() == {MODEL, OTHER}
    runs = [scripted_generation(str(n), model=(MODEL, OTHER)[n % 2]) for n in range(10)]
    for run in runs:
        schedulers.submit([run])
    await all_ended(runs)
    assert_complete(runs)
    for peer in both:
        assert {request.model for request in peer.submitted} == {peer.model}


async def test_requests_are_refused_unread_only_while_every_model_refuses_them(
    connect: Connect, both: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(*[await peer.start() for peer in both])
    both[0].retry_after = 9
    await eventually(lambda: schedulers.retry_after_for(MODEL) == 9)
    assert schedulers.retry_after_for(OTHER) == 0
    assert schedulers.retry_after == 0
    both[1].retry_after = 4
    await eventually(lambda: schedulers.retry_after == 4)
    both[1].ready_workers = 0
    await eventually(lambda: sum(link.ready for link in schedulers.links.values()) == 1)
    assert schedulers.retry_after == 0, "requests for the other model wait for its workers"
    assert schedulers.retry_after_for(OTHER) == 0


async def test_messages_of_one_model_do_not_dispatch_what_waits_for_another(
    connect: Connect, both: list[ScriptedScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dispatch visits all waiting requests, which may be thousands."""
    addresses = [await peer.start() for peer in both]
    schedulers = await connect(*addresses)
    links = [schedulers.links[address] for address in addresses]
    await both[0].stop()
    await eventually(lambda: not links[0].ready)
    waiting = [scripted_generation(str(number)) for number in range(5)]
    for run in waiting:
        schedulers.submit([run])
    dispatched: list[int] = []
    dispatch = schedulers._waiting.dispatch

    def counting() -> None:
        dispatched.append(1)
        dispatch()

    with monkeypatch.context() as patch:
        patch.setattr(schedulers._waiting, "dispatch", counting)
        schedulers._waiting.link_changed(links[1])
        assert dispatched == []
        late = scripted_generation("late", model=OTHER)
        schedulers._waiting.add(late)
        schedulers._waiting.link_changed(links[1])
        assert dispatched == [1]
    await all_ended([late])
    await both[0].start(addresses[0])
    await all_ended(waiting)
    assert_complete([late, *waiting])


async def test_a_suspect_of_a_lost_model_does_not_wait_because_another_is_ready(
    connect: Connect, both: list[ScriptedScheduler]
) -> None:
    address = await both[0].start()
    schedulers = await connect(address, await both[1].start(), resume_seconds=0.3)
    await both[0].stop()
    await eventually(lambda: not schedulers.links[address].ready)
    lost = suspect()
    schedulers._waiting.add(lost)
    await all_ended([lost], 5)
    assert lost.failure is not None
    assert lost.failure.code == Code.UNAVAILABLE
    assert MODEL in lost.failure.message


@pytest.mark.parametrize("model", [MODEL, OTHER])
async def test_lost_schedulers_of_another_model_are_no_evidence_for_a_suspect(
    connect: Connect, both: list[ScriptedScheduler], model: str
) -> None:
    """A trial is evidence until a scheduler without the suspect is lost, too."""
    addresses = [await peer.start() for peer in both]
    schedulers = await connect(*addresses)
    accused = suspect()
    accused.suspicion.add_trial(Loss("alone", True), 0.0, 1.0)
    schedulers._waiting.add(accused)
    lost = schedulers.links[addresses[model == OTHER]]
    schedulers._waiting.link_lost(lost, [], Loss("beside", True))
    assert bool(accused.suspicion._trials) == (model == OTHER)


async def test_an_expected_model_is_not_unknown_before_it_is_served(
    both: list[ScriptedScheduler],
) -> None:
    targets = [await both[0].start()]

    async def resolved(_: Address) -> list[str]:
        return targets

    schedulers = Schedulers(
        parse_addresses("schedulers:1"), GatewayMetrics(), resolved, expected_models=[MODEL, OTHER]
    )
    await schedulers.start()
    try:
        await eventually(lambda: schedulers.ready)
        assert schedulers.model(MODEL).id == MODEL
        with pytest.raises(RequestError) as early:
            schedulers.model(OTHER)
        refusal = ApiError.of(early.value)
        assert (refusal.status, refusal.headers) == (503, {"retry-after": "1"})
        with pytest.raises(RequestError) as unknown:
            schedulers.model("other")
        assert ApiError.of(unknown.value).status == 404
        with pytest.raises(RequestError, match=f"served are {MODEL}, {OTHER}"):
            schedulers.model(None)
        targets.append(await both[1].start())
        await schedulers.refresh()
        await eventually(lambda: OTHER in schedulers.models())
        targets.pop()
        await schedulers.refresh()
        await asyncio.sleep(0)
        assert len(schedulers.links) == 1
        assert schedulers.model(OTHER).id == OTHER, "its requests wait"
    finally:
        await schedulers.close()
