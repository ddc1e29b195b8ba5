"""Workers with the embedded model and torch operations in float32, and requests for them."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from pagewire.bench.schemas import random_schema
from pagewire.models import EMBEDDED_NAME
from support.children import children_of
from support.clients.load import Answer, Load, Question
from support.processes.fleet import Fleet
from support.processes.fleet_checks import check_answers, report, until_idle

WORKER = (
    "worker",
    "--ops=torch",
    "--device=cpu",
    "--dtype=float32",
    "--torch-threads=1",
    "--num-blocks=400",
    "--num-slots=16",
)
CLIENTS = 6
PAUSED_SECONDS = 7  # longer than a peer waits for a heartbeat
PROMPTS = [
    "Once upon a time there was a fox",
    "One day, a small bird flew over the",
    "The old man said:",
    "What is seven plus five? It is",
    "Count: one, two, three,",
    "The opposite of hot is",
]


def questions(count: int) -> list[Question]:
    """Greedy and sampled requests.

    Some have log probabilities, an echoed prompt, penalties or stop strings.
    """
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
        if number % 6 < 2:
            body["echo"] = True  # half of them with log probabilities
        if number % 4 > 1:
            body |= {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
            body["logit_bias"] = {str(number): 2.0}
        if number % 5 == 0:
            body["stop"] = ["the end", "\n\n"]
        made.append(Question("/v1/completions", body))
    return made


def constrained_questions(count: int) -> list[Question]:
    """`questions`, each with a constraint on its output."""
    made = questions(count)
    for number, question in enumerate(made):
        question.body.update({"ignore_eos": False, "stop": None, "max_tokens": 100})
        if number % 3 == 0:
            question.body["guided_regex"] = "([a-z]{2,9} ){5,9}\\.( [A-Z][a-z]+){3,12}"
        else:
            schema = {"name": "x", "schema": random_schema(number)}
            question.body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return made


async def run_with_fault(
    fleet: Fleet,
    asked: list[Question],
    want: list[Answer],
    victim: str,
    number: signal.Signals,
    tolerance: float = 1e-4,
    mask_process: int | None = None,
) -> None:
    """Sends a signal when a quarter of the questions is answered; checks all answers.

    `tolerance` is for log probabilities, whose last bits depend on the batch. With `mask_process`,
    this mask process of the victim gets the signal; number 0 has started the others.
    """
    load = Load(fleet.urls, asked, CLIENTS)
    running = asyncio.create_task(load.run())
    await load.reached(len(asked) // 4)
    if mask_process is None:
        fleet.signal(victim, number)
    else:
        os.kill(mask_processes(fleet.supervisor.pids[victim])[mask_process], number)
    if number is signal.SIGSTOP:
        await asyncio.sleep(PAUSED_SECONDS)
        fleet.signal(victim, signal.SIGCONT)
    got = await running
    report(f"real model, {number.name} to {victim}", asked, got, want)
    check_answers(fleet, asked, got, want, tolerance=tolerance)
    await until_idle(fleet, workers=len(fleet.names("worker")))


def mask_processes(worker: int) -> list[int]:
    """The mask processes of a worker: the first, and those that it has forked."""
    for child in children_of(worker):
        if "mask_server" in Path(f"/proc/{child}/cmdline").read_text():
            return [child, *children_of(child)]
    raise AssertionError(f"worker {worker} has no mask process")
