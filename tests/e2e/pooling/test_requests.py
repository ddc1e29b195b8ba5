"""Requests without output are limited, counted, ended and rerun like completions."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch

from pagewire.auth.keys import entry_of, new_key
from pagewire.auth.rate_limits import RateLimits
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.models.pooling_models import embedding, save_embedder
from support.processes.stack_process import RunningStack, running_stack
from support.waiting import until

KEY, LIMITED = new_key(), new_key()
MANY = ["some words to embed " * 20] * 400


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningStack, Any]]:
    """A mean over all tokens, in a pool much smaller than the waiting requests, with an API key."""
    folder = tmp_path_factory.mktemp("crowded")
    model = save_embedder(folder, "mean")
    keys = folder / "keys.yaml"
    limited = entry_of("two", LIMITED, None, RateLimits(tokens_per_minute=9000))
    keys.write_text(f"{entry_of('one', KEY, None, RateLimits())}\n{limited}\n")
    flags = ("--num-blocks", "40", "--num-slots", "8", "--torch-threads", "1")
    flags += ("--worker-max-num-batched-tokens", "32", "--check-invariants")
    with running_stack(*flags, "--api-keys-file", str(keys), model=folder) as stack:
        yield stack, model


def post(stack: RunningStack, key: str = KEY, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{stack.url}/v1/embeddings", json=body, headers=headers, timeout=90)


def counter(stack: RunningStack, name: str) -> float:
    headers = {"authorization": f"Bearer {KEY}"}
    text = httpx.get(f"{stack.url}/metrics", headers=headers).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def test_means_survive_a_full_pool(crowded) -> None:
    stack, model = crowded
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 500, (24,), generator=generator).tolist()
    inputs = [torch.randint(0, 400, (n,), generator=generator).tolist() for n in lengths]
    before = counter(stack, "pagewire_gateway_prompt_tokens_total")
    answer = post(stack, input=inputs)
    assert answer.status_code == 200, answer.text
    for entry, tokens in zip(answer.json()["data"], inputs, strict=True):
        wanted = torch.tensor(embedding(model, tokens, "mean"))
        found = torch.tensor(entry["embedding"])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    after = counter(stack, "pagewire_gateway_prompt_tokens_total")
    assert after - before == answer.json()["usage"]["prompt_tokens"] == sum(lengths)


def test_a_deadline_ends_them(crowded) -> None:
    stack, _ = crowded
    answer = post(stack, input=MANY, deadline_ms=50)
    assert answer.status_code == 504
    until(lambda: _idle(stack))


async def test_a_client_that_leaves_ends_them(crowded) -> None:
    stack, _ = crowded
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as client:
        request = asyncio.ensure_future(
            client.post(f"{stack.url}/v1/embeddings", json={"input": MANY}, timeout=90)
        )
        await asyncio.to_thread(until, lambda: not _idle(stack))
        request.cancel()
    await asyncio.to_thread(until, lambda: _idle(stack))


def test_prompt_tokens_are_charged_to_the_key(crowded) -> None:
    stack, _ = crowded
    ids = [list(range(400))] * 20
    assert post(stack, LIMITED, input=ids).status_code == 200
    refused = post(stack, LIMITED, input=ids)
    assert refused.status_code == 429
    assert "tokens" in refused.json()["error"]["message"]
    assert httpx.post(f"{stack.url}/v1/embeddings", json={"input": "a"}).status_code == 401


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
async def test_a_killed_process_loses_nothing(embedder, victim: str) -> None:
    texts = [f"{victim} sentence {number} " * (1 + number % 20) for number in range(200)]
    url, model = f"{embedder.stack.url}/v1/embeddings", Path(embedder.folder).name
    async with httpx.AsyncClient(timeout=90) as client:
        running = [
            asyncio.ensure_future(
                client.post(url, json={"model": model, "input": texts[at : at + 50]})
            )
            for at in range(0, len(texts), 50)
        ]
        while not await _computes(embedder.stack.grpc_address):
            await asyncio.sleep(0.005)
        assert not all(task.done() for task in running)
        embedder.stack.kill(victim)
        answers = await asyncio.gather(*running)
    for at, answer in enumerate(answers):
        assert answer.status_code == 200, answer.text
        for text, entry in zip(texts[50 * at :], answer.json()["data"], strict=False):
            wanted = torch.tensor(embedding(embedder.model, embedder.tokens(text), "last"))
            found = torch.tensor(entry["embedding"])
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    lines = [line for line in embedder.stack.log if "resumes=" in line]
    assert any("resumes=0" not in line for line in lines), "no request ran again"


def _idle(stack: RunningStack) -> bool:
    names = ("pagewire_gateway_running{", "pagewire_gateway_waiting{")
    return sum(counter(stack, name) for name in names) == 0


async def _computes(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        load = await inference_pb2_grpc.InferenceStub(channel).GetLoad(pb.GetLoadRequest())
    return load.running > 0
