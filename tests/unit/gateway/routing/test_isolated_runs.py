"""Requests that may crash schedulers run alone; they fail, and other requests complete."""

import asyncio
import random

import pytest

from pagewire.errors import Code
from pagewire.gateway.routing.link import SETTLE_SECONDS
from support.scripted.routing import (
    Connect,
    all_ended,
    assert_complete,
    scripted_generation,
    suspect,
)
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually


@pytest.fixture
def short_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the time that a process must live without a suspect between two of its runs."""
    monkeypatch.setattr("pagewire.suspicion.SURVIVAL_SECONDS", 0.4)


async def test_other_requests_wait_twice_while_suspects_wait(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    address = await peers[0].start()
    schedulers = await connect(address, resume_seconds=0.5)
    await peers[0].stop()
    await eventually(lambda: not schedulers.ready)
    waiting, other = suspect("suspect"), scripted_generation("other")
    began = asyncio.get_running_loop().time()
    for run in (waiting, other):
        schedulers._waiting.add(run)
    schedulers._waiting.dispatch()
    await all_ended([other])
    assert 0.9 < asyncio.get_running_loop().time() - began < 2
    await all_ended([waiting])
    assert other.failure is not None
    assert other.failure.code == Code.UNAVAILABLE


@pytest.mark.usefixtures("short_controls")
@pytest.mark.parametrize("count", [1, 2])
async def test_a_poison_request_fails_after_a_bounded_number_of_losses(
    connect: Connect, peers: list[ScriptedScheduler], count: int
) -> None:
    for peer in peers:
        peer.deadly, peer.step = "poison", 0.01
    addresses = [await peer.start() for peer in peers]
    schedulers = await connect(*addresses[:count])
    harmless = [scripted_generation(f"harmless {number}", 60) for number in range(12)]
    poison = scripted_generation("poison")
    for run in (*harmless[:6], poison, *harmless[6:]):
        schedulers.submit([run])
    await all_ended([poison, *harmless])
    assert poison.failure is not None
    assert poison.failure.code == Code.INTERNAL
    assert "5 schedulers in a row were lost" in poison.failure.message
    assert "the last 2 with nothing else to do" in poison.failure.message
    assert_complete(harmless)
    assert sum(peer.deaths for peer in peers) == 5
    open_at_death = [number for peer in peers for number in peer.open_at_death]
    assert sorted(open_at_death)[:2] == [1, 1], "it was alone twice"


@pytest.mark.usefixtures("short_controls")
@pytest.mark.parametrize("gateways", [1, 2])
async def test_two_poison_requests_fail_and_all_others_complete(
    connect: Connect, peers: list[ScriptedScheduler], gateways: int
) -> None:
    peers[0].deadly, peers[0].step = "poison", 0.01
    address = await peers[0].start()
    pools = [await connect(address, resume_seconds=20.0) for _ in range(gateways)]
    poisons = [scripted_generation(f"poison {number}") for number in range(2)]
    harmless = [scripted_generation(f"harmless {number}", 60) for number in range(8)]
    for number, run in enumerate([*harmless[:4], *poisons, *harmless[4:]]):
        pools[number % gateways].submit([run])
    await all_ended([*poisons, *harmless], 40)
    for poison in poisons:
        assert poison.failure is not None
        assert poison.failure.code == Code.INTERNAL, poison.failure
    assert_complete(harmless)
    # Each crashes it three times among others and twice alone. Some losses void a run of the other
    # one.
    assert peers[0].deaths <= 2 * (3 + 2) + 2 * 3


@pytest.mark.usefixtures("short_controls")
@pytest.mark.parametrize("seed", range(3))
async def test_harmless_requests_complete_though_schedulers_keep_failing(
    connect: Connect, peers: list[ScriptedScheduler], seed: int
) -> None:
    """All are suspects from the beginning, as schedulers are lost before the first token."""
    rng = random.Random(seed)
    for peer in peers:
        peer.step = 0.05
    schedulers = await connect(*[await peer.start() for peer in peers], resume_seconds=20.0)
    runs = [suspect(f"run {number}", 10) for number in range(20)]
    for run in runs:
        schedulers.submit([run])

    async def kill() -> None:
        while sum(peer.deaths for peer in peers) < 12:
            await asyncio.sleep(rng.uniform(0.1, 0.6))
            await rng.choice(peers).die()

    await asyncio.wait_for(kill(), 30)
    for peer in peers:
        await peer.stop()
        await peer.start(peer._address)
    await all_ended(runs, 30)
    assert_complete(runs)


async def test_a_request_that_lost_two_schedulers_lets_others_run_first(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """Otherwise a scheduler could end each time before other gateways have connected."""
    peers[0].deadly = "poison"
    schedulers = await connect(await peers[0].start())
    (link,) = schedulers.links.values()
    poison, clock = scripted_generation("poison"), asyncio.get_running_loop().time
    schedulers.submit([poison])
    await eventually(lambda: poison.losses == 2)
    assert peers[0].deaths == 2
    await eventually(lambda: link.ready)
    connected_at, harmless = clock(), scripted_generation()
    schedulers.submit([harmless])
    await all_ended([harmless])
    assert_complete([harmless])
    assert peers[0].deaths == 2
    await eventually(lambda: peers[0].deaths == 3)
    assert clock() - connected_at > 0.8 * SETTLE_SECONDS


async def test_a_broken_connection_is_not_a_loss(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """The same process answers again."""
    address = await peers[0].start()
    schedulers = await connect(address)
    peers[0].step = 60.0  # no token arrives
    run = scripted_generation()
    schedulers.submit([run])
    for cuts in range(1, 8):
        await eventually(lambda cuts=cuts: len(peers[0].submitted) == cuts)
        await peers[0].cut()
        await eventually(lambda: run.losses == 1)
        peers[0].step = 60.0 if cuts < 7 else 0.01
        await peers[0].start(address)
        await eventually(lambda: run.losses == 0)
    await all_ended([run], 5)
    assert_complete([run])


async def test_a_draining_scheduler_is_not_a_loss(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start())
    peers[0].step = 0.05
    run = scripted_generation(tokens=500)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 1)
    peers[0].draining = True
    await eventually(lambda: any(link.draining for link in schedulers.links.values()))
    await peers[0].stop()
    await eventually(lambda: run.moved)
    assert run.losses == 0


async def test_suspects_run_alone_while_others_run_elsewhere(
    connect: Connect, peers: list[ScriptedScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gateway.routing.isolated_runs.CLEARED_AFTER_SECONDS", 0.5)
    peers[0].step = peers[1].step = 0.05
    schedulers = await connect(*[await peer.start() for peer in peers])
    peers[1].waiting = 50
    await eventually(lambda: any(link.load.waiting for link in schedulers.links.values()))
    suspects = [suspect(f"suspect {number}", 4) for number in range(3)]
    other = scripted_generation("other", 40)
    schedulers.submit([other])
    await eventually(lambda: len(other.tokens) > 2)
    for run in suspects:
        schedulers._waiting.add(run)
    schedulers._waiting.dispatch()
    await all_ended([other, *suspects])
    assert_complete([other, *suspects])
    assert peers[0].submitted[0].prompt == "other"
    assert len(peers[1].submitted) >= 1, "the other request moved there meanwhile"


class TokenlessScheduler(ScriptedScheduler):
    """Sends messages, but no tokens."""

    def _delta(self, *_: object) -> None:
        pass


async def test_a_scheduler_that_survives_a_suspect_clears_it(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gateway.routing.isolated_runs.CLEARED_AFTER_SECONDS", 0.4)
    peer = TokenlessScheduler()
    schedulers = await connect(await peer.start())
    run = suspect(tokens=500)
    schedulers._waiting.add(run)
    schedulers._waiting.dispatch()
    await eventually(lambda: run.losses == 0)
    assert len(run.tokens) == 0
    await peer.stop()


async def test_an_aborted_suspect_does_not_prolong_the_waits_of_others(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start(), resume_seconds=0.3)
    peers[0].ready_workers = 0
    await eventually(lambda: not schedulers.ready)
    waiting, other = suspect("suspect"), scripted_generation("other")
    schedulers._waiting.add(waiting)
    schedulers._waiting.dispatch()
    assert schedulers.observes_every_message
    schedulers.abort(waiting)
    assert not schedulers.observes_every_message
    schedulers.submit([other])
    await all_ended([other])
    assert not other.has_waited_twice


async def test_without_a_reservation_suspects_run_among_others(
    connect: Connect, peers: list[ScriptedScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gateway.routing.isolated_runs.RESERVATION_TIMEOUT_SECONDS", 0.3)
    schedulers = await connect(await peers[0].start())
    peers[0].grants, peers[0].step = False, 0.02
    run = suspect()
    schedulers._waiting.add(run)
    schedulers._waiting.dispatch()
    async with asyncio.timeout(30):
        while not run.ended:
            peers[0].waiting += 1  # keeps load reports arriving
            await asyncio.sleep(0.02)
    assert_complete([run])


async def test_a_suspect_that_is_handed_back_resumes_where_a_worker_is(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(*[await peer.start() for peer in peers])
    peers[0].unable = True
    peers[1].waiting = 50
    await eventually(lambda: any(link.load.waiting for link in schedulers.links.values()))
    run = suspect()
    schedulers._waiting.add(run)
    schedulers._waiting.dispatch()
    await all_ended([run])
    assert_complete([run])
