"""The embedded model on the reference backend in fp32: no byte shows what a run has survived."""

import asyncio
import signal
from typing import Any

import pytest

from pagewire.models import EMBEDDED_NAME
from support.fleet import Fleet, running_fleet
from support.load import Load, Question
from support.trial import check, report, rest

pytestmark = pytest.mark.chaos

WORKER = (
    "worker",
    "--backend=torch",
    "--device=cpu",
    "--dtype=float32",
    "--torch-threads=1",
    "--num-blocks=400",
    "--num-slots=16",
)
CLIENTS = 6
PROMPTS = [
    "Once upon a time there was a fox",
    "One day, a small bird flew over the",
    "The old man said:",
    "What is seven plus five? It is",
    "Count: one, two, three,",
    "The opposite of hot is",
]


def questions(count: int) -> list[Question]:
    """Greedy and seeded, with log probabilities, penalties, stop strings and shared prompts."""
    made = []
    for number in range(count):
        body: dict[str, Any] = {
            "model": EMBEDDED_NAME,
            "prompt": PROMPTS[number % len(PROMPTS)],
            "max_tokens": 60 + 10 * (number % 5),
            "ignore_eos": True,
            "temperature": 0 if number % 2 else 0.9,
            "seed": number,
            "stream": number % 4 != 3,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if number % 3 == 0:
            body["logprobs"] = 3
        if number % 4 > 1:
            body |= {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
            body["logit_bias"] = {str(number): 2.0}
        if number % 5 == 0:
            body["stop"] = ["the end", "\n\n"]
        made.append(Question("/v1/completions", body))
    return made


async def run(fleet: Fleet, asked: list[Question], victim: str, number: signal.Signals) -> None:
    want = await Load(fleet.urls, asked, CLIENTS).run()
    load = Load(fleet.urls, asked, CLIENTS)
    running = asyncio.create_task(load.run())
    await load.reached(len(asked) // 4)
    fleet.signal(victim, number)
    if number is signal.SIGSTOP:
        await asyncio.sleep(7)
        fleet.signal(victim, signal.SIGCONT)
    got = await running
    report(f"real model, {number.name} to {victim}", asked, got, want)
    check(fleet, asked, got, want, tolerance=1e-4)
    await rest(fleet, workers=len(fleet.names("worker")))


@pytest.mark.usefixtures("full_size")
@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("worker-0", signal.SIGKILL),
        ("worker-0", signal.SIGSTOP),
        ("scheduler-0", signal.SIGKILL),
    ],
)
async def test_every_byte_is_as_in_an_undisturbed_run(victim: str, number: signal.Signals) -> None:
    asked = questions(24)
    async with running_fleet(workers=2, worker_command=WORKER) as fleet:
        await run(fleet, asked, victim, number)


async def test_the_only_worker_with_the_real_model_returns() -> None:
    asked = questions(12)
    async with running_fleet(workers=1, worker_command=WORKER) as fleet:
        await run(fleet, asked, "worker-0", signal.SIGKILL)
