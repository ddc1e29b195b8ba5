"""The load that one server accepts at once by default: many requests, and large batches."""

import asyncio
import time

import httpx
import openai
import pytest

from pagewire.models import EMBEDDED_NAME
from support.processes.stack_process import RunningStack, running_stack


async def test_a_thousand_requests_at_once_are_all_served() -> None:
    """As `vllm bench serve` sends them by default, to a server with the default number of slots."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with running_stack("--num-slots", "256") as stack:
        http = httpx.AsyncClient(base_url=stack.url, timeout=300, limits=limits)

        async def send(number: int) -> int:
            prompt = f"{number}. Once upon a time"
            body = {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body)
            return answer.status_code

        async with http:
            statuses = await asyncio.gather(*(send(number) for number in range(1000)))
    assert {status: statuses.count(status) for status in set(statuses)} == {200: 1000}


@pytest.mark.parametrize(("prompts", "n"), [(64, 16), (1024, 1)])
def test_a_batch_on_an_idle_server_is_served(
    client: openai.OpenAI, stack: RunningStack, prompts: int, n: int
) -> None:
    texts = [f"{number} foxes" for number in range(prompts)]
    began = time.monotonic()
    answer = client.completions.create(
        model=EMBEDDED_NAME, prompt=texts, n=n, max_tokens=2, extra_body={"ignore_eos": True}
    )
    assert len(answer.choices) == prompts * n == 1024
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 1024, time.monotonic() - began


def test_a_batch_is_refused_as_a_whole_by_what_others_have_waiting() -> None:
    """A queue for eight is full: no part of a batch of 24 runs. Later the whole batch is served."""
    with running_stack("--num-slots", "2", "--max-waiting-requests", "8") as stack:
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0)

        def batch() -> int:
            answer = client.completions.create(
                model=EMBEDDED_NAME, prompt=["One"] * 24, max_tokens=4, temperature=0
            )
            return len(answer.choices)

        assert batch() == 24, "its own parts do not count"
        with client.completions.create(
            model=EMBEDDED_NAME,
            prompt=["A long story"] * 16,
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as others:
            next(iter(others))
            time.sleep(0.5)  # the load reaches the gateway ten times a second
            with pytest.raises(openai.RateLimitError, match="waiting already") as caught:
                batch()
            assert int(caught.value.response.headers["retry-after"]) >= 1
        deadline = time.monotonic() + 30
        while True:
            try:
                assert batch() == 24
                break
            except openai.RateLimitError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
