"""Log probabilities through the whole stack with the embedded model, against transformers."""

from typing import Any

import openai
import pytest
import torch

from pagewire.models import EMBEDDED_NAME
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.stack_process import RunningStack

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
COUNT, TOP = 60, 4


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
def test_values_equal_those_of_transformers(
    client: openai.OpenAI,
    stub: inference_pb2_grpc.InferenceStub,
    reference: tuple[Any, Any],
    temperature: float,
) -> None:
    model, tokenizer = reference
    (choice,) = chat(client, temperature=temperature).choices
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
    for response in stub.Generate(request):
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


def test_a_killed_worker_loses_no_logprob(stack: RunningStack, client: openai.OpenAI) -> None:
    whole = chat(client).choices[0].logprobs.content
    streamed: list[Any] = []
    for number, chunk in enumerate(chat(client, stream=True)):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
        if number == 10:
            stack.kill_worker()
    assert number > 10
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    got = torch.tensor([[e.logprob, *(o.logprob for o in e.top_logprobs)] for e in streamed])
    want = torch.tensor([[e.logprob, *(o.logprob for o in e.top_logprobs)] for e in whole])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


def test_logprobs_match_the_text_up_to_a_stop_string(client: openai.OpenAI) -> None:
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
