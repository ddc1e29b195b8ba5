"""Log probabilities and echoed prompts through the whole stack, against transformers."""

import json
from typing import Any

import httpx
import openai
import pytest
import torch

from pagewire.models import EMBEDDED_NAME
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.stack_process import RunningStack

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
COUNT, TOP = 60, 4
PROMPT = "Once upon a time there was a fox – and a “bear”. " * 3


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


def post(stack: RunningStack, path: str = "completions", **fields: Any) -> dict[str, Any]:
    body = {"model": EMBEDDED_NAME, "temperature": 0, "max_tokens": 5, **fields}
    answer = httpx.post(f"{stack.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(stack: RunningStack, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": EMBEDDED_NAME, "temperature": 0, "max_tokens": 5, "stream": True, **fields}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    """Log probabilities `[tokens - 1, vocabulary]` of each token after the first."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def check_tokens(logprobs: dict[str, Any], ids: list[int], model: Any, tokenizer: Any) -> None:
    """The four arrays of `logprobs` against the model, for the tokens `ids` from the first on."""
    want = expected(model, ids)
    own = want[torch.arange(len(ids) - 1), ids[1:]]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    got = torch.tensor(logprobs["token_logprobs"][1:])
    torch.testing.assert_close(got, own, rtol=0, atol=1e-3)
    for entry, value, row in zip(logprobs["top_logprobs"][1:], own, want, strict=True):
        assert max(entry.values()) == pytest.approx(float(row.max()), abs=1e-3)
        assert any(other == pytest.approx(float(value), abs=1e-3) for other in entry.values())
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(ids)


@pytest.mark.parametrize("as_tokens", [False, True])
def test_echo_comes_before_the_output_with_log_probabilities(
    stack: RunningStack, reference: tuple[Any, Any], as_tokens: bool
) -> None:
    model, tokenizer = reference
    ids = tokenizer(PROMPT)["input_ids"]
    prompt = ids if as_tokens else PROMPT
    plain = post(stack, prompt=prompt, logprobs=2)
    answer = post(stack, prompt=prompt, logprobs=2, echo=True)
    (choice,), (other,) = answer["choices"], plain["choices"]
    assert choice["text"] == PROMPT + other["text"]
    assert choice["finish_reason"] == other["finish_reason"] == "length"
    assert "prompt_logprobs" not in choice
    assert answer["usage"]["total_tokens"] == len(ids) + 5
    logprobs = choice["logprobs"]
    output = tokenizer(choice["text"])["input_ids"]
    assert output[: len(ids)] == ids
    assert logprobs["tokens"][len(ids) :] == other["logprobs"]["tokens"]
    prompt_part = {name: values[: len(ids)] for name, values in logprobs.items()}
    check_tokens(prompt_part, ids, model, tokenizer)
    shifted = [len(PROMPT) + offset for offset in other["logprobs"]["text_offset"]]
    assert logprobs["text_offset"][len(ids) :] == shifted
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        whole = "\ufffd" not in token
        assert not whole or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stream_begins_with_the_prompt(stack: RunningStack, logprobs: int | None) -> None:
    fields = {"prompt": [PROMPT, "A bird"], "n": 2, "seed": 4, "temperature": 0.9, "echo": True}
    whole = post(stack, logprobs=logprobs, **fields)["choices"]
    chunks = [chunk["choices"][0] for chunk in events(stack, logprobs=logprobs, **fields)]
    for choice in whole:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert mine[0]["text"] == (PROMPT if choice["index"] < 2 else "A bird")
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        if logprobs is None:
            assert all(chunk["logprobs"] is None for chunk in mine)
            continue
        for name in ("tokens", "text_offset"):
            joined = [v for chunk in mine if chunk["logprobs"] for v in chunk["logprobs"][name]]
            assert joined == choice["logprobs"][name]


def test_a_request_for_no_tokens_only_scores(
    stack: RunningStack, reference: tuple[Any, Any]
) -> None:
    model, tokenizer = reference
    ids = tokenizer(PROMPT)["input_ids"]
    answer = post(stack, prompt=[ids, ids], echo=True, logprobs=1, max_tokens=0)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == 2 * len(ids)
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        check_tokens(choice["logprobs"], ids, model, tokenizer)
    texts = post(stack, prompt=[PROMPT, PROMPT], echo=True, max_tokens=0, n=2)
    assert [choice["text"] for choice in texts["choices"]] == [PROMPT] * 4
    streamed = events(stack, prompt=ids, echo=True, logprobs=0, max_tokens=0)
    assert [chunk["choices"][0]["text"] for chunk in streamed] == [PROMPT, ""]


def test_prompt_logprobs_have_ids_ranks_and_text(
    stack: RunningStack, reference: tuple[Any, Any]
) -> None:
    model, tokenizer = reference
    ids = tokenizer(PROMPT)["input_ids"]
    (choice,) = post(stack, prompt=PROMPT, prompt_logprobs=3)["choices"]
    assert choice["logprobs"] is None
    chat = post(stack, "chat/completions", messages=MESSAGES, prompt_logprobs=3, n=2)
    rendered = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    for found, tokens in ((choice["prompt_logprobs"], ids), (chat["prompt_logprobs"], rendered)):
        assert found[0] is None
        for entry, token, row in zip(found[1:], tokens[1:], expected(model, tokens), strict=True):
            assert next(iter(entry)) == str(token)
            own = entry[str(token)]
            assert own["rank"] == int((row > row[token]).sum()) + 1
            likeliest = {str(other) for other in row.topk(3).indices.tolist()}
            assert set(entry) == {str(token)} | likeliest
            for other, value in entry.items():
                assert value["logprob"] == pytest.approx(float(row[int(other)]), abs=1e-3)
        for entry, token in zip(found[1:], tokens[1:], strict=True):
            assert entry[str(token)]["decoded_token"] == tokenizer.decode([token])


def test_best_of_and_both_kinds_of_log_probabilities(stack: RunningStack) -> None:
    fields = {"prompt": PROMPT, "echo": True, "temperature": 0.9, "seed": 1}
    answer = post(stack, best_of=4, n=2, logprobs=1, prompt_logprobs=5, **fields)
    for choice in answer["choices"]:
        assert choice["text"].startswith(PROMPT)
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] >= [5]
        assert max(map(len, choice["logprobs"]["top_logprobs"][1:])) <= 2
        values = zip(
            choice["logprobs"]["token_logprobs"][1:], choice["prompt_logprobs"][1:], strict=False
        )
        assert all(next(iter(entry.values()))["logprob"] == value for value, entry in values)


def test_a_killed_worker_changes_no_echoed_stream(stack: RunningStack) -> None:
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 60, "seed": 3}
    whole = post(stack, temperature=0.9, **fields)["choices"][0]
    body = {"model": EMBEDDED_NAME, "temperature": 0.9, "stream": True, **fields}
    text, tokens, number = "", [], 0
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            text += choice["text"]
            tokens += choice["logprobs"]["tokens"] if choice["logprobs"] else []
            number += 1
            if number == 10:
                stack.kill_worker()
    assert number > 10
    assert text == whole["text"]
    assert tokens == whole["logprobs"]["tokens"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1 without echo"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs come with a whole answer only"),
        ({"echo": True, "use_beam_search": True}, "echo cannot be used with beam search"),
        ({"prompt_logprobs": 0, "use_beam_search": True}, "prompt_logprobs cannot be used with"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens is 1, above max_tokens 0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model=EMBEDDED_NAME, prompt="hi", extra_body=fields)
