"""The choice of the scheduler for a request."""

import pytest

from pagewire.gateway.affinity import by_preference, prompt_head
from pagewire.gateway.generation.common_fields import CommonFields
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.v1 import inference_pb2 as pb
from support.scripted.routing import (
    Connect,
    all_ended,
    assert_complete,
    candidates_of_a_prompt,
    conversation,
    scripted_generation,
)
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually


async def test_least_loaded_gets_the_request(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].waiting = 5
    peers[0].step = peers[1].step = 0.02
    schedulers = await connect(*[await peer.start() for peer in peers])
    for _ in range(9):
        schedulers.submit([scripted_generation()])
    await eventually(lambda: sum(len(peer.submitted) for peer in peers) == 9)
    assert [len(peer.submitted) for peer in peers] == [2, 7], "5 + 2 and 7 are level"


async def test_load_is_compared_per_worker(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].waiting, peers[0].ready_workers = 6, 3
    peers[1].waiting, peers[1].ready_workers = 4, 1
    schedulers = await connect(*[await peer.start() for peer in peers])
    schedulers.submit([scripted_generation()])
    await eventually(lambda: len(peers[0].submitted) == 1)


async def test_a_draining_scheduler_gets_no_requests(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(*[await peer.start() for peer in peers])
    peers[0].draining = True
    await eventually(lambda: any(link.draining for link in schedulers.links.values()))
    for _ in range(4):
        schedulers.submit([scripted_generation()])
    await eventually(lambda: len(peers[1].submitted) == 4)
    assert peers[0].submitted == []


async def test_candidates_of_a_prompt_stay_together(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """Their scheduler shares the KV of their prompt, also after another one was lost."""
    peers.append(ScriptedScheduler())
    for peer in peers:
        peer.step = 0.01
    schedulers = await connect(*[await peer.start() for peer in peers])
    candidates = candidates_of_a_prompt(5, tokens=60)
    schedulers.submit(candidates)
    await eventually(lambda: all(len(each.tokens) > 5 for each in candidates))
    assert sorted(len(peer.submitted) for peer in peers) == [0, 0, 5]
    first = next(peer for peer in peers if peer.submitted)
    await first.stop()
    await all_ended(candidates)
    assert sorted(len(peer.submitted) for peer in peers) == [0, 5, 5]
    assert_complete(candidates)


@pytest.fixture
async def schedulers(connect: Connect, peers: list[ScriptedScheduler]) -> Schedulers:
    """Connected to three schedulers."""
    peers.append(ScriptedScheduler())
    for peer in peers:
        peer.step = 0.01
    return await connect(*[await peer.start() for peer in peers])


async def test_a_preferred_scheduler_gets_its_share_and_a_quarter_more(
    schedulers: Schedulers,
) -> None:
    """All requests prefer the same scheduler.

    Request k goes there while it has fewer than ceil(1.25 k / 3), otherwise to the second scheduler
    under the same bound, otherwise to the third.
    """
    request = conversation("popular")
    request.stop.max_tokens = 1000
    common = CommonFields(head=prompt_head(request))
    order = by_preference(common.head, list(schedulers.links))
    taken = []
    for number in range(8):
        before = [schedulers.links[target].num_requests for target in order]
        schedulers.submit(
            [Generation(request, number, 0, UpdateQueue(), eager=False, common=common)]
        )
        after = [schedulers.links[target].num_requests for target in order]
        taken += [place for place in range(3) if after[place] > before[place]]
    assert taken == [0, 1, 0, 1, 0, 1, 2, 0]


async def test_conversations_return_without_overloading_a_scheduler(
    peers: list[ScriptedScheduler], schedulers: Schedulers
) -> None:
    def send(request: pb.GenerateRequest, tokens: int) -> Generation:
        request.sampling.seed = 1
        request.stop.max_tokens = tokens
        common = CommonFields(head=prompt_head(request))
        generation = Generation(request, 0, 0, UpdateQueue(), eager=False, common=common)
        schedulers.submit([generation])
        return generation

    def num_submitted(first_turn: str) -> list[int]:
        return [
            sum(request.chat.messages[1].content == first_turn for request in peer.submitted)
            for peer in peers
        ]

    for turns in (["A"], ["A", "x", "B"], ["A", "x", "B", "y", "C"]):
        generation = send(conversation(*turns), 2)
        await generation.updates.take()
        await eventually(lambda: all(link.num_requests == 0 for link in schedulers.links.values()))
    assert sorted(num_submitted("A")) == [0, 0, 3], "each turn went where the first one went"
    for _ in range(60):
        send(conversation("popular"), 200)
    await eventually(lambda: sum(num_submitted("popular")) == 60)
    assert max(num_submitted("popular")) <= 26, "at most a quarter above its share"
