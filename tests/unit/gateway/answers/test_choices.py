"""Which candidates become choices: with best_of those with the best log probabilities."""

from collections.abc import AsyncIterator

import httpx
import pytest

from pagewire.gateway.answers.choices import choices
from pagewire.gateway.api.completions import CompletionFormatter
from pagewire.gateway.api.formatting import Envelope
from pagewire.gateway.api.job import Job
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.v1 import inference_pb2 as pb
from support.scripted.in_process_gateway import in_process_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler, expected_text


def generation(index: int, prompt: int, tokens: int, logprob: float) -> Generation:
    made = Generation(pb.GenerateRequest(), index, prompt, UpdateQueue(), eager=False)
    made.extend(bytes(4 * tokens), f"text {index}".encode(), 0.0)
    made.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH, cumulative_logprob=logprob))
    return made


def job(candidates: int, n: int) -> Job:
    formatter = CompletionFormatter(Envelope("cmpl", "text_completion", "m"))
    return Job([], [], candidates, n, formatter, False, False, False)


def test_the_candidates_with_the_best_mean_come_first() -> None:
    generations = [
        generation(0, 0, 2, -4.0),  # -2 a token
        generation(1, 0, 10, -9.0),  # -0.9
        generation(2, 0, 1, -1.0),  # -1
        generation(3, 1, 4, -2.0),  # -0.5
        generation(4, 1, 1, -0.2),  # -0.2
        generation(5, 1, 1, -9.0),
    ]
    texts = [choice.text for choice in choices(job(3, 2), generations)]
    assert texts == ["text 1", "text 2", "text 4", "text 3"]


def test_if_all_candidates_are_choices_they_keep_their_order() -> None:
    generations = [generation(0, 0, 1, -4.0), generation(1, 0, 1, -1.0)]
    assert [choice.text for choice in choices(job(2, 2), generations)] == ["text 0", "text 1"]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with in_process_gateway(ScriptedScheduler()) as client:
        yield client


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_best_of_returns_the_best_candidates(
    client: httpx.AsyncClient, logprobs: int | None
) -> None:
    """The candidates are the choices of a request with n = best_of."""
    body = {"prompt": "a b", "max_tokens": 4, "seed": 5}
    all_candidates = await client.post("/v1/completions", json={**body, "n": 4, "logprobs": 0})
    choices = all_candidates.json()["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / 4 for c in choices]
    assert len(set(means)) > 1
    best = sorted(range(4), key=lambda i: means[i], reverse=True)[:2]
    answer = await client.post(
        "/v1/completions", json={**body, "n": 2, "best_of": 4, "logprobs": logprobs}
    )
    made = answer.json()
    assert [c["index"] for c in made["choices"]] == [0, 1]
    assert [c["text"] for c in made["choices"]] == [expected_text("a b", 5 + i, 4) for i in best]
    shown = [choices[i]["logprobs"] if logprobs is not None else None for i in best]
    assert [c["logprobs"] for c in made["choices"]] == shown
    assert made["usage"]["prompt_tokens"] == 2
    assert made["usage"]["completion_tokens"] == 16, "all candidates were generated"
