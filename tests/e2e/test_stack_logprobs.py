"""Log probabilities through the whole stack with the embedded model, against transformers."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagewire.models import EMBEDDED_NAME
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.stack_process import EMBEDDED_FOLDER, RunningStack, running_stack

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
COUNT, TOP = 60, 4


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with running_stack() as started:
        yield started


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)


def client_of(stack: RunningStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"seed": 5, "temperature": 0.9, "max_tokens": COUNT, **fields}
    return client.chat.completions.create(
        model=EMBEDDED_NAME, messages=MESSAGES, logprobs=True, top_logprobs=TOP, **fields
    )


def log_probabilities(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_values_are_those_of_transformers(
    stack: RunningStack, reference: tuple[Any, Any], temperature: float
) -> None:
    model, tokenizer = reference
    (choice,) = chat(client_of(stack), temperature=temperature).choices
    content = choice.logprobs.content
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    data = b"".join(bytes(entry.bytes) for entry in content)
    assert data.decode().startswith(choice.message.content)

    request = pb.GenerateRequest(
        chat=pb.ChatInput(messages=[pb.ChatMessage(**message) for message in MESSAGES]),
        sampling=pb.SamplingParams(temperature=temperature, seed=5),
        stop=pb.StopConditions(max_tokens=COUNT),
        logprobs=TOP,
    )
    tokens, own, top_ids, top, pieces = [], [], [], [], []
    with grpc.insecure_channel(stack.grpc_address) as channel:
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            tokens += response.token_ids
            own += response.logprobs
            top_ids += response.top_token_ids
            top += response.top_logprobs
            pieces += response.token_bytes
            finish = response.finish
    assert [entry.logprob for entry in content] == own
    assert [bytes(entry.bytes) for entry in content] == pieces
    assert [other.logprob for entry in content for other in entry.top_logprobs] == top
    assert finish.cumulative_logprob == sum(own)

    expected = log_probabilities(model, prompt, tokens)
    rows = torch.arange(len(tokens))
    torch.testing.assert_close(torch.tensor(own), expected[rows, tokens], rtol=0, atol=1e-3)
    values = torch.tensor(top).view(-1, TOP)
    torch.testing.assert_close(values, expected.topk(TOP).values, rtol=0, atol=1e-3)
    ids = torch.tensor(top_ids).view(-1, TOP)
    torch.testing.assert_close(values, expected.gather(1, ids), rtol=0, atol=1e-3)


def test_a_killed_worker_costs_no_logprob() -> None:
    with running_stack() as stack:
        client = client_of(stack)
        whole = chat(client).choices[0].logprobs.content
        streamed: list[Any] = []
        for number, chunk in enumerate(chat(client, stream=True)):
            if chunk.choices[0].logprobs:
                streamed += chunk.choices[0].logprobs.content
            if number == 10:
                [worker] = stack.pids("worker")
                os.kill(worker, signal.SIGKILL)
        assert [entry.token for entry in streamed] == [entry.token for entry in whole]
        got = torch.tensor([[e.logprob, *(o.logprob for o in e.top_logprobs)] for e in streamed])
        want = torch.tensor([[e.logprob, *(o.logprob for o in e.top_logprobs)] for e in whole])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


def test_they_match_the_text_up_to_a_stop_string(stack: RunningStack) -> None:
    client = client_of(stack)
    text = chat(client).choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = chat(client, stop=[stop])
    (choice,) = answer.choices
    data = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode()
    assert data.startswith(choice.message.content + stop)
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    completion = client.completions.create(
        model=EMBEDDED_NAME, prompt="Once upon a time", max_tokens=30, temperature=0, logprobs=2
    )
    (choice,) = completion.choices
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token) or offset == len(choice.text)
