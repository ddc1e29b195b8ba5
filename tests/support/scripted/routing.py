"""Generations for scripted schedulers, and checks, for tests of the gateway's routing."""

from collections.abc import Awaitable, Callable, Sequence

from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.suspicion import Loss
from pagewire.v1 import inference_pb2 as pb
from support.scripted.scripted_scheduler import MODEL, token_at
from support.waiting import eventually

SEED = 3

Connect = Callable[..., Awaitable[Schedulers]]


def scripted_generation(prompt: str = "hi", tokens: int = 8, model: str = MODEL) -> Generation:
    """A generation of `tokens` tokens."""
    request = pb.GenerateRequest(
        request_id="r",
        model=model,
        prompt=prompt,
        sampling=pb.SamplingParams(seed=SEED),
        stop=pb.StopConditions(max_tokens=tokens),
    )
    return Generation(request, 0, 0, UpdateQueue(), eager=False)


def candidates_of_a_prompt(count: int, tokens: int) -> list[Generation]:
    """Generations of one prompt and one HTTP request."""
    request, updates = scripted_generation("hi", tokens).request, UpdateQueue[Generation]()
    return [Generation(request, index, 0, updates, eager=False) for index in range(count)]


def conversation(*turns: str, model: str = MODEL, system: str = "Be brief.") -> pb.GenerateRequest:
    """A chat request; `turns` are a message of the user, its answer, a message, and so on."""
    messages = [pb.ChatMessage(role="system", content=system)]
    for index, text in enumerate(turns):
        messages.append(pb.ChatMessage(role=("user", "assistant")[index % 2], content=text))
    return pb.GenerateRequest(model=model, chat=pb.ChatInput(messages=messages))


def suspect(prompt: str = "hi", tokens: int = 8) -> Generation:
    """A generation with which three schedulers were lost."""
    generation = scripted_generation(prompt, tokens)
    for _ in range(3):
        generation.record_loss(Loss("before", True))
    return generation


def scripted_tokens(prompt: str, count: int) -> list[int]:
    """The tokens that scripted schedulers generate for a prompt."""
    return [token_at(prompt, SEED, index) for index in range(count)]


async def all_ended(generations: Sequence[Generation], seconds: float = 30) -> None:
    """Waits until each has completed or failed."""
    await eventually(lambda: all(generation.ended for generation in generations), seconds)


def assert_complete(generations: Sequence[Generation]) -> None:
    """Checks that each has all tokens of its script, on any schedulers."""
    for generation in generations:
        assert generation.failure is None, generation.failure
        assert generation.queued, "its reader was not woken"
        request = generation.request
        wanted = scripted_tokens(request.prompt, request.stop.max_tokens)
        assert generation.tokens.tolist() == wanted


async def more_messages(schedulers: Schedulers, count: int = 200) -> None:
    """Waits until every connected scheduler has sent `count` more messages."""
    connections = [link._connection for link in schedulers.links.values() if link.connected]
    wanted = [connection._num_received + count for connection in connections]
    await eventually(
        lambda: all(
            connection._num_received >= number
            for connection, number in zip(connections, wanted, strict=True)
        )
    )
