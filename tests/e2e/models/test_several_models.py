"""`pagewire run` with two models: one that is killed or flooded does not affect the other."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from support.processes.stack_process import RunningStack, running_stack

pytestmark = pytest.mark.timeout(240)

# Two models with the same tokenizer; the second has random weights, so their texts differ.
FIRST, SECOND = "first", "org/second:1"
FLAGS = (
    "--model",
    f"{SECOND}=embedded,load-format=dummy,seed=7",
    "--torch-threads",
    "1",
    "--playground",
)
PROMPTS = [f"Tell me about {topic}." for topic in ("ships", "rain", "bread", "clocks")]
TOKENS = 400
# Beyond the quiet run's longest pause: other processes, also starting ones, use the cores.
MAX_EXTRA_PAUSE = 1.0


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    first = f"{FIRST}=embedded,num-slots=4,max-waiting-requests=2"
    with running_stack(*FLAGS, model=first) as started:
        yield started


@dataclass
class Stream:
    """One answer at its client; `pause` is the longest wait for a chunk, in seconds."""

    status: int = 0
    text: str = ""
    pause: float = 0.0
    finish: str | None = None


async def stream(
    client: httpx.AsyncClient, model: str, prompt: str, tokens: int = TOKENS
) -> Stream:
    """One streamed completion, read to its end."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    got = Stream()
    at = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        got.status = answer.status_code
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            now = time.monotonic()
            got.pause, at = max(got.pause, now - at), now
            for choice in event["choices"]:
                got.text += choice["text"]
                got.finish = choice["finish_reason"] or got.finish
    return got


async def streams(client: httpx.AsyncClient, model: str) -> list[Stream]:
    """A stream of each prompt, all at once."""
    return list(await asyncio.gather(*(stream(client, model, prompt) for prompt in PROMPTS)))


def connect(stack: RunningStack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.url, timeout=90, trust_env=False)


def pid_of(stack: RunningStack, service: str, model: str) -> int:
    """The only process of a service for a model."""
    flag = f"--served-model-name={model}".encode()
    [pid] = [
        pid for pid in stack.pids(service) if flag in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


def assert_undisturbed(seen: list[Stream], quiet: list[Stream]) -> None:
    """Every stream has the text of the quiet run, and waited no longer for a chunk."""
    assert [each.text for each in seen] == [each.text for each in quiet]
    assert {each.finish for each in seen} == {"length"}
    longest, undisturbed = (max(each.pause for each in run) for run in (seen, quiet))
    print(f"longest pause {longest:.2f} s, {undisturbed:.2f} s in the quiet run")
    assert longest < undisturbed + MAX_EXTRA_PAUSE


def shown(*arguments: str) -> str:
    """The output of a command."""
    command = [sys.executable, "-m", "pagewire.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_both_models_are_listed_and_answer_as_themselves(stack: RunningStack) -> None:
    assert f"Pagewire is ready: {FIRST}, {SECOND} at {stack.url}" in stack.output
    rows = [line.split() for line in shown("models", "--url", stack.url).splitlines()[1:]]
    assert [row[0] for row in rows] == [FIRST, SECOND]
    async with connect(stack) as client:
        first, second = await asyncio.gather(streams(client, FIRST), streams(client, SECOND))
        unknown = await client.post("/v1/completions", json={"model": "third", "prompt": "x"})
    assert all(a.text != b.text for a, b in zip(first, second, strict=True))
    assert unknown.status_code == 404
    listed = [line.split() for line in shown("ps").splitlines()[1:]]
    model_of = {int(row[1]): row[2] for row in listed}
    for model in (FIRST, SECOND):
        for service in ("worker", "scheduler"):
            assert model_of[pid_of(stack, service, model)] == model


@pytest.mark.parametrize("service", ["worker", "scheduler"])
async def test_a_killed_process_of_one_model_leaves_the_streams_of_the_other_alone(
    stack: RunningStack, service: str
) -> None:
    async with connect(stack) as client:
        quiet_first, quiet = await asyncio.gather(streams(client, FIRST), streams(client, SECOND))
        of_first = asyncio.create_task(streams(client, FIRST))
        of_second = asyncio.create_task(streams(client, SECOND))
        await asyncio.sleep(0.3)
        assert not of_first.done()
        assert not of_second.done()
        os.kill(pid_of(stack, service, FIRST), signal.SIGKILL)
        assert_undisturbed(await of_second, quiet)
        late = await streams(client, SECOND)
        assert_undisturbed(late, quiet)
        resumed = await of_first
        assert [each.text for each in resumed] == [each.text for each in quiet_first]


async def test_an_overloaded_model_leaves_the_streams_of_the_other_alone(
    stack: RunningStack,
) -> None:
    async with connect(stack) as client:
        quiet_first, quiet = await asyncio.gather(streams(client, FIRST), streams(client, SECOND))
        flood = [asyncio.create_task(stream(client, FIRST, PROMPTS[0])) for _ in range(60)]
        await asyncio.sleep(0.1)
        assert_undisturbed(await streams(client, SECOND), quiet)
        answers = await asyncio.gather(*flood)
    statuses = [answer.status for answer in answers]
    assert 429 in statuses
    assert set(statuses) == {200, 429}
    served = {answer.text for answer in answers if answer.status == 200}
    assert served == {quiet_first[0].text}


async def test_requests_of_a_killed_model_wait_and_those_of_the_other_do_not(
    stack: RunningStack,
) -> None:
    async with connect(stack) as client:
        # Shorter than the start of a worker, which imports torch.
        quiet = await stream(client, SECOND, PROMPTS[0], 20)
        os.kill(pid_of(stack, "worker", FIRST), signal.SIGKILL)
        waiting = asyncio.create_task(stream(client, FIRST, PROMPTS[0], 20))
        second = await stream(client, SECOND, PROMPTS[0], 20)
        assert (await client.get("/readyz")).status_code == 200
        assert not waiting.done()
        assert second.text == quiet.text
        assert (await waiting).finish == "length"


async def test_the_page_kills_a_worker_of_the_model_that_answers(stack: RunningStack) -> None:
    async with connect(stack) as client:
        [quiet, *_] = await streams(client, SECOND)
        answering = asyncio.create_task(stream(client, SECOND, PROMPTS[0]))
        await asyncio.sleep(0.3)
        missing = await client.post("/engine/kill", json={"model": "third"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (409, "no_worker")
        assert (await client.post("/engine/kill", json={"model": 3})).status_code == 400
        first = pid_of(stack, "worker", FIRST)
        killed = await client.post("/engine/kill", json={"model": SECOND})
        assert killed.json() == {"killed": f"{SECOND}/worker-0"}
        assert (await answering).text == quiet.text
        assert pid_of(stack, "worker", FIRST) == first
