"""/v1/embeddings over real processes: results, forms, limits, refusals."""

import base64
import json
import random
import re
import struct
import subprocess

import grpc
import httpx
import openai
import pytest
import torch

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.models.pooling_models import embedding

TEXTS = [
    "hello",
    "The quick brown fox jumps over the lazy dog. How are you today?",
    "x",
    "I am fine, thank you. " * 9,  # chunks of several steps
]
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def client_of(stack) -> tuple[openai.OpenAI, str]:
    client = openai.OpenAI(base_url=f"{stack.stack.url}/v1", api_key="x", max_retries=0)
    [model] = client.models.list()
    return client, model.id


def check(data: list, expected: list[list[float]]) -> None:
    assert [entry.index for entry in data] == list(range(len(expected)))
    for entry, wanted in zip(data, expected, strict=True):
        torch.testing.assert_close(torch.tensor(entry.embedding), torch.tensor(wanted), **TOLERANCE)


def test_texts_and_token_ids_have_the_embeddings_of_transformers(embedder) -> None:
    client, model = client_of(embedder)
    expected = [embedding(embedder.model, embedder.tokens(text), "last") for text in TEXTS]
    made = client.embeddings.create(model=model, input=TEXTS)  # base64 by default
    check(made.data, expected)
    assert made.model == model
    count = sum(len(embedder.tokens(text)) for text in TEXTS)
    assert made.usage.prompt_tokens == made.usage.total_tokens == count
    check(client.embeddings.create(model=model, input=TEXTS[1]).data, expected[1:2])
    ids = [embedder.tokens(text) for text in TEXTS]
    check(client.embeddings.create(model=model, input=ids).data, expected)
    check(client.embeddings.create(model=model, input=ids[3]).data, expected[3:])
    as_numbers = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    check(as_numbers.data, expected)


def test_base64_is_that_of_the_numbers(embedder) -> None:
    url, body = f"{embedder.stack.url}/v1/embeddings", {"input": "hello", "dimensions": 5}
    numbers = httpx.post(url, json=body).json()["data"][0]["embedding"]
    encoded = httpx.post(url, json={**body, "encoding_format": "base64"}).json()
    data = base64.b64decode(encoded["data"][0]["embedding"])
    assert list(struct.unpack("<5f", data)) == numbers


def test_dimensions_cut_before_the_length_becomes_1(embedder) -> None:
    client, model = client_of(embedder)
    made = client.embeddings.create(model=model, input=TEXTS, dimensions=10)
    check(made.data, [embedding(embedder.model, embedder.tokens(t), "last", 10) for t in TEXTS])


def test_a_mean_is_over_all_tokens_and_none_are_cached(mean_embedder) -> None:
    client, model = client_of(mean_embedder)
    expected = [embedding(mean_embedder.model, mean_embedder.tokens(t), "mean") for t in TEXTS]
    for _ in range(2):
        made = client.embeddings.create(model=model, input=TEXTS)
        check(made.data, expected)
        assert made.usage.prompt_tokens_details["cached_tokens"] == 0


def test_the_last_token_uses_the_prefix_cache(embedder) -> None:
    client, model = client_of(embedder)
    text = "naive cafe " * 20
    first, second = (client.embeddings.create(model=model, input=[text]) for _ in range(2))
    check(second.data, [embedding(embedder.model, embedder.tokens(text), "last")])
    assert second.usage.prompt_tokens_details["cached_tokens"] > 16
    assert first.usage.prompt_tokens == second.usage.prompt_tokens


def test_truncation_keeps_the_side_that_is_asked_for(embedder) -> None:
    client, model = client_of(embedder)
    ids = embedder.tokens(TEXTS[3])
    for side, kept in (("left", ids[-20:]), ("right", ids[:20])):
        options = {"truncate_prompt_tokens": 20, "truncation_side": side}
        made = client.embeddings.create(model=model, input=[TEXTS[3]], extra_body=options)
        check(made.data, [embedding(embedder.model, kept, "last")])
        assert made.usage.prompt_tokens == 20


def test_the_longest_prompt_fits_and_a_longer_one_does_not(embedder) -> None:
    client, model = client_of(embedder)
    longest = client.models.retrieve(model).max_model_len
    random.seed(1)
    ids = [random.randrange(400) for _ in range(longest)]
    made = client.embeddings.create(model=model, input=ids)
    check(made.data, [embedding(embedder.model, ids, "last")])
    for too_long in ([*ids, 1], "many words " * longest):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as raised:
            client.embeddings.create(model=model, input=too_long)
        assert raised.value.param == "input"
        assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="in the input at index 1, 0 in"):
        client.embeddings.create(model=model, input=["short", "many words " * longest])
    options = {"truncate_prompt_tokens": -1}
    made = client.embeddings.create(model=model, input=[*ids, 1], extra_body=options)
    assert made.usage.prompt_tokens == longest


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input is required"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [[1], []]}, "input", "input at index 1 is empty"),
        ({"input": 5}, "input", "a string, token ids, or an array"),
        ({"input": [100_000]}, "input", "input: token id 100000 is outside the model's vocabulary"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "dimensions": 65}, "dimensions", "1 to 64"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float or base64"),
        ({"input": "a", "normalize": False}, "normalize", "not supported"),
        ({"input": "a", "messages": [{}]}, "messages", "not supported"),
        ({"input": "a", "priority": 3}, "priority", "--policy priority"),
        ({"input": "a", "truncation_side": "up"}, "truncation_side", "left or right"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side", "needs truncate_prompt"),
    ],
)
def test_wrong_fields_are_named(embedder, body: dict, param: str, message: str) -> None:
    answer = httpx.post(f"{embedder.stack.url}/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_other_endpoints_name_the_right_one(embedder, path: str, body: dict) -> None:
    [model] = httpx.get(f"{embedder.stack.url}/v1/models").json()["data"]
    answer = httpx.post(embedder.stack.url + path, json={"model": model["id"], **body})
    assert answer.status_code == 400
    assert "gives embeddings only; use /v1/embeddings" in answer.json()["error"]["message"]


def test_a_model_that_generates_embeds_nothing(stack) -> None:
    answer = httpx.post(f"{stack.url}/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 400
    assert "generates text only" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "model"


def test_grpc(embedder) -> None:
    params = pb.PoolingParams(task=pb.POOLING_TASK_EMBED, dimensions=12)
    request = pb.GenerateRequest(prompt=TEXTS[1], pooling=params)
    with grpc.insecure_channel(embedder.stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        answer = stub.Pool(request)
        ids = embedder.tokens(TEXTS[1])
        wanted = embedding(embedder.model, ids, "last", 12)
        torch.testing.assert_close(
            torch.tensor(list(answer.values)), torch.tensor(wanted), **TOLERANCE
        )
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
        assert answer.request_id.startswith("request-")
        [model] = stub.ListModels(pb.ListModelsRequest()).models
        assert model.task == pb.POOLING_TASK_EMBED
        large = pb.GenerateRequest(prompt="too long " * 20_000, pooling=params)
        for wrong, message in (
            (pb.GenerateRequest(prompt="a"), "pooling is required"),
            (pb.GenerateRequest(prompt="a", pooling=pb.PoolingParams()), "POOLING_TASK_EMBED"),
            (pb.GenerateRequest(prompt="a", pooling=params, logprobs=1), "logprobs is about"),
            (
                pb.GenerateRequest(
                    prompt="a", pooling=params, stop=pb.StopConditions(max_tokens=3)
                ),
                r"stop.max_tokens is 3",
            ),
            (
                pb.GenerateRequest(pair=pb.TextPair(query="a"), pooling=params),
                "pair is not an input of POOLING_TASK_EMBED",
            ),
            (large, "maximum context length"),
        ):
            with pytest.raises(grpc.RpcError, match=message) as raised:
                stub.Pool(wrong)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_empty_text_is_refused_only_if_it_has_no_tokens(embedder) -> None:
    client, model = client_of(embedder)
    made = client.embeddings.create(model=model, input=["a", ""])
    check(made.data, [embedding(embedder.model, embedder.tokens(t), "last") for t in ("a", "")])
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model=model, input="", extra_body={"add_special_tokens": False})
    assert raised.value.body["param"] == "input"
    assert raised.value.body["message"] == "input is empty; give at least one token"
    params = pb.PoolingParams(task=pb.POOLING_TASK_EMBED)
    with grpc.insecure_channel(embedder.stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        values = stub.Pool(pb.GenerateRequest(prompt="", pooling=params)).values
        torch.testing.assert_close(list(values), made.data[1].embedding, **TOLERANCE)
        plain = pb.GenerateRequest(prompt="", pooling=params, add_special_tokens=False)
        with pytest.raises(grpc.RpcError, match="prompt is empty; give at least one token"):
            stub.Pool(plain)


def test_a_large_body_and_many_inputs(embedder) -> None:
    """Parsed and tokenized in helper processes; results are in the order of the inputs."""
    client, model = client_of(embedder)
    texts = [f"{'word ' * (number % 50)} {number}" for number in range(300)]
    made = client.embeddings.create(model=model, input=texts)
    check(made.data, [embedding(embedder.model, embedder.tokens(t), "last") for t in texts])
    long = "y" * 9000  # too large for the scheduler to tokenize itself
    options = {"truncate_prompt_tokens": 100}
    made = client.embeddings.create(model=model, input=[long], extra_body=options)
    ids = embedder.tokens(long)[-100:]
    check(made.data, [embedding(embedder.model, ids, "last")])


def test_the_printed_example_works(embedder) -> None:
    command = re.search(r"curl (?:.|\n)*?'\{.*\}'", embedder.stack.output)
    assert command is not None
    answer = subprocess.run(command[0], shell=True, capture_output=True, text=True, check=True)
    [entry] = json.loads(answer.stdout)["data"]
    wanted = embedding(embedder.model, embedder.tokens("Once upon a time"), "last")
    torch.testing.assert_close(torch.tensor(entry["embedding"]), torch.tensor(wanted), **TOLERANCE)
    assert "pagewire chat" not in embedder.stack.output
