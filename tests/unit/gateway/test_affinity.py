"""Which scheduler a prompt belongs to."""

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from pagewire.addresses import parse_addresses
from pagewire.gateway.affinity import by_preference, prompt_head
from pagewire.gateway.generation.common_fields import CommonFields
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.v1 import inference_pb2 as pb
from support.scripted.scripted_scheduler import MODEL, ScriptedScheduler
from support.waiting import eventually

TARGETS = [f"10.0.0.{n}:50051" for n in range(5)]


def chat(*turns: str, model: str = MODEL, system: str = "Be brief.") -> pb.GenerateRequest:
    """A conversation: the user's turn, the answer, the user's turn, and so on."""
    messages = [pb.ChatMessage(role="system", content=system)]
    for index, text in enumerate(turns):
        messages.append(pb.ChatMessage(role=("user", "assistant")[index % 2], content=text))
    return pb.GenerateRequest(model=model, chat=pb.ChatInput(messages=messages))


def test_later_turns_have_the_head_of_the_first() -> None:
    assert prompt_head(chat("Hello", "Hi", "More")) == prompt_head(chat("Hello"))
    assert prompt_head(chat("Hello")) != prompt_head(chat("Hallo"))
    assert prompt_head(chat("Hello")) != prompt_head(chat("Hello", system="Be long."))
    assert prompt_head(chat("Hello")) != prompt_head(chat("Hello", model="other"))


def test_prompts_have_a_head_when_they_are_long_enough_to_share() -> None:
    def text(prompt: str) -> bytes:
        return prompt_head(pb.GenerateRequest(prompt=prompt))

    def ids(tokens: list[int]) -> bytes:
        return prompt_head(pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=tokens)))

    assert text("short") == ids([1, 2]) == b""
    assert text("x" * 600) == text("x" * 700) != b""
    assert text("y" + "x" * 600) != text("x" * 600)
    assert ids([7] * 200) == ids([7] * 300) != b""
    assert ids([8] + [7] * 200) != ids([7] * 200)


def test_a_target_that_goes_moves_its_own_prompts_only() -> None:
    keys = [f"key {n}".encode() for n in range(2000)]
    before = {key: by_preference(key, TARGETS) for key in keys}
    homes = Counter(order[0] for order in before.values())
    assert min(homes.values()) > 300
    gone, rest = TARGETS[2], TARGETS[:2] + TARGETS[3:]
    for key in keys:
        assert by_preference(key, rest) == [target for target in before[key] if target != gone]


@pytest.fixture
async def peers() -> AsyncIterator[list[ScriptedScheduler]]:
    peers = [ScriptedScheduler(step=0.01) for _ in range(3)]
    yield peers
    for peer in peers:
        await peer.stop()


@pytest.fixture
async def schedulers(peers: list[ScriptedScheduler]) -> AsyncIterator[Schedulers]:
    addresses = ",".join([await peer.start() for peer in peers])
    schedulers = Schedulers(parse_addresses(addresses), GatewayMetrics())
    await schedulers.start()
    await eventually(lambda: all(link.ready for link in schedulers.links.values()))
    yield schedulers
    await schedulers.close()


async def test_a_scheduler_has_its_share_and_a_quarter_more(schedulers: Schedulers) -> None:
    """Of requests that all belong to the first: number k goes there while it has fewer than
    ceil(1.25 k / 3), else to the second under the same bound, else to the third."""
    request = chat("popular")
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


async def test_conversations_return_and_no_scheduler_is_overrun(
    peers: list[ScriptedScheduler], schedulers: Schedulers
) -> None:
    def send(request: pb.GenerateRequest, tokens: int) -> Generation:
        request.sampling.seed = 1
        request.stop.max_tokens = tokens
        common = CommonFields(head=prompt_head(request))
        generation = Generation(request, 0, 0, UpdateQueue(), eager=False, common=common)
        schedulers.submit([generation])
        return generation

    def home(first_turn: str) -> list[int]:
        return [
            sum(request.chat.messages[1].content == first_turn for request in peer.submitted)
            for peer in peers
        ]

    for turns in (["A"], ["A", "x", "B"], ["A", "x", "B", "y", "C"]):
        generation = send(chat(*turns), 2)
        await generation.updates.take()
        await eventually(lambda: all(link.num_requests == 0 for link in schedulers.links.values()))
    assert sorted(home("A")) == [0, 0, 3], "each turn went where the first one did"
    for _ in range(60):
        send(chat("popular"), 200)
    await eventually(lambda: sum(home("popular")) == 60)
    assert max(home("popular")) <= 26, "a fourth above its share, and no more"
