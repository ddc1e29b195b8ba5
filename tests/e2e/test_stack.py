"""The whole stack with the embedded model, over HTTP and gRPC."""

import asyncio
import random
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagewire.models import EMBEDDED_NAME
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.stack_process import RunningStack, is_idle
from support.waiting import until

QUESTIONS = [
    "Hello! Who are you?",
    "What is seven plus five?",
    "Count from three to nine.",
    "Tell me a story about a fox.",
    "What is the opposite of hot?",
    "What colour is the sky?",
]


def reference_answer(reference: tuple, question: str, max_tokens: int, **generation: object) -> str:
    model, tokenizer = reference
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False, **generation)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def chat(client: openai.OpenAI, question: str, **fields: object) -> Any:
    return client.chat.completions.create(
        model=EMBEDDED_NAME, messages=[{"role": "user", "content": question}], **fields
    )


@pytest.mark.parametrize("question", QUESTIONS)
def test_streamed_and_unary_text_equal_that_of_transformers(
    client: openai.OpenAI, reference: tuple, question: str
) -> None:
    want = reference_answer(reference, question, 120)
    unary = chat(client, question, temperature=0, max_tokens=120)
    chunks = list(chat(client, question, temperature=0, max_tokens=120, stream=True))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert unary.choices[0].message.content == want
    assert streamed == want
    assert unary.choices[0].finish_reason == chunks[-1].choices[0].finish_reason
    assert unary.usage.completion_tokens <= 120


def test_grpc_gives_the_same_text(stub: inference_pb2_grpc.InferenceStub, reference: tuple) -> None:
    request = pb.GenerateRequest(
        chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content=QUESTIONS[1])]),
        sampling=pb.SamplingParams(temperature=0),
        stop=pb.StopConditions(max_tokens=60),
    )
    text = "".join(response.text for response in stub.Generate(request))
    assert text == reference_answer(reference, QUESTIONS[1], 60)


def test_repetition_penalty_matches_transformers(
    client: openai.OpenAI, stub: inference_pb2_grpc.InferenceStub, reference: tuple
) -> None:
    penalty, stop = {"repetition_penalty": 1.3}, pb.StopConditions(max_tokens=80)
    plain = [reference_answer(reference, question, 80) for question in QUESTIONS]
    want = [reference_answer(reference, question, 80, **penalty) for question in QUESTIONS]
    assert want != plain
    for question, text in zip(QUESTIONS, want, strict=True):
        answer = chat(client, question, temperature=0, max_tokens=80, extra_body=penalty)
        assert answer.choices[0].message.content == text
        request = pb.GenerateRequest(
            chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content=question)]),
            sampling=pb.SamplingParams(temperature=0, **penalty),
            stop=stop,
        )
        assert "".join(response.text for response in stub.Generate(request)) == text


def test_penalties_and_biases_change_the_sampled_tokens(client: openai.OpenAI) -> None:
    def tokens(**fields: Any) -> list[str]:
        given = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}} | fields
        answer = client.completions.create(
            model=EMBEDDED_NAME, prompt=[5, 6, 7], logprobs=0, **given
        )
        return answer.choices[0].logprobs.tokens

    plain, two = tokens(), {"40": 100, "41": 100}
    assert len(plain) == 24
    assert tokens(presence_penalty=2) != plain
    assert tokens(frequency_penalty=2) != plain
    assert tokens(presence_penalty=0, frequency_penalty=0, logit_bias={"40": -100}) == plain
    assert len(set(tokens(logit_bias=two))) == 1
    assert len(set(tokens(logit_bias=two, frequency_penalty=-2))) == 1
    assert len(set(tokens(logit_bias=two, frequency_penalty=2))) == 2
    # Choice i equals the answer to a request with seed + i.
    drawn = {"temperature": 1.0, "presence_penalty": 1.0, "logit_bias": {"40": 2.5}}
    answer = client.completions.create(
        model=EMBEDDED_NAME, prompt=[5, 6, 7], seed=3, n=3, max_tokens=24, **drawn
    )
    for i, choice in enumerate(answer.choices):
        alone = client.completions.create(
            model=EMBEDDED_NAME, prompt=[5, 6, 7], seed=3 + i, max_tokens=24, **drawn
        )
        assert alone.choices[0].text == choice.text


def test_http_and_grpc_refuse_biased_ids_outside_the_vocabulary_alike(
    client: openai.OpenAI, stub: inference_pb2_grpc.InferenceStub
) -> None:
    with pytest.raises(openai.BadRequestError) as over_http:
        client.completions.create(model=EMBEDDED_NAME, prompt="x", logit_bias={"99999999": 1})
    assert over_http.value.param == "logit_bias"
    request = pb.GenerateRequest(
        prompt="x", sampling=pb.SamplingParams(logit_bias={99999999: 1}), model=EMBEDDED_NAME
    )
    with pytest.raises(grpc.RpcError) as over_grpc:
        list(stub.Generate(request))
    assert over_grpc.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "token id 99999999 is outside the model's vocabulary" in over_grpc.value.details()
    assert over_grpc.value.details() in over_http.value.message


def test_prompts_of_one_request_are_answered_as_if_alone(client: openai.OpenAI) -> None:
    prompts = ["Once upon a time", "The fox", "One day, a small bird flew over the"]
    together = client.completions.create(
        model=EMBEDDED_NAME, prompt=prompts, temperature=0, max_tokens=40
    )
    for prompt, choice in zip(prompts, together.choices, strict=True):
        alone = client.completions.create(
            model=EMBEDDED_NAME, prompt=prompt, temperature=0, max_tokens=40
        )
        assert choice.text == alone.choices[0].text


def test_seeded_sampling_repeats(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        answer = chat(client, QUESTIONS[3], temperature=1.0, seed=seed, max_tokens=60)
        return answer.choices[0].message.content

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_choice_i_equals_an_answer_with_seed_plus_i(client: openai.OpenAI, stream: bool) -> None:
    fields = {"temperature": 1.0, "max_tokens": 60}
    alone = [chat(client, QUESTIONS[3], seed=40 + i, **fields) for i in range(3)]
    expected = [answer.choices[0].message.content for answer in alone]
    made = chat(client, QUESTIONS[3], seed=40, n=3, stream=stream, **fields)
    texts = ["", "", ""]
    if stream:
        for chunk in made:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = [choice.message.content for choice in made.choices]
        assert made.usage.prompt_tokens == alone[0].usage.prompt_tokens
        assert made.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)
    assert texts == expected
    assert len(set(expected)) == 3


def test_stop_strings_end_the_answer(client: openai.OpenAI, reference: tuple) -> None:
    want = reference_answer(reference, QUESTIONS[2], 80)
    stop = want[len(want) // 2 : len(want) // 2 + 3]
    answer = chat(client, QUESTIONS[2], temperature=0, max_tokens=80, stop=[stop])
    assert answer.choices[0].message.content == want[: want.find(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_health_and_reflection(stack: RunningStack) -> None:
    with grpc.insecure_channel(stack.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "pagewire.v1.Inference"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        [listed] = reflection.ServerReflectionInfo(iter([ask]))
        names = {service.name for service in listed.list_services_response.service}
        assert "pagewire.v1.Inference" in names


def test_a_disconnected_client_frees_its_blocks(
    stack: RunningStack, stub: inference_pb2_grpc.InferenceStub
) -> None:
    body = {"model": EMBEDDED_NAME, "prompt": "Once", "max_tokens": 1900, "ignore_eos": True}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json={**body, "stream": True}) as r:
        lines = r.iter_lines()  # keep it: httpx closes the connection when it is deleted
        next(lines)
        assert stub.GetLoad(pb.GetLoadRequest()).used_blocks > 0
    until(lambda: is_idle(stub), 5)


def test_random_requests_and_aborts_leave_no_block_in_use(
    stack: RunningStack, stub: inference_pb2_grpc.InferenceStub
) -> None:
    rng = random.Random(0)

    async def one(session: httpx.AsyncClient, limit: asyncio.Semaphore) -> int:
        body = {
            "model": EMBEDDED_NAME,
            "prompt": [rng.randrange(256, 1000) for _ in range(rng.randint(1, 120))],
            "max_tokens": rng.randint(1, 24),
            "temperature": rng.choice([0, 0.7]),
            "stream": rng.random() < 0.7,
        }
        leave_after = rng.choice([0.0, 0.02, 0.2, None, None])
        async with limit:
            call = session.post(f"{stack.url}/v1/completions", json=body)
            try:
                response = await asyncio.wait_for(call, leave_after)
            except TimeoutError:
                return 0
            assert response.status_code == 200
            return 1

    async def many() -> int:
        limit = asyncio.Semaphore(24)
        async with httpx.AsyncClient(timeout=60) as session:
            return sum(await asyncio.gather(*(one(session, limit) for _ in range(500))))

    assert 100 < asyncio.run(many()) < 500
    until(lambda: is_idle(stub), 10)


def test_a_killed_worker_loses_no_token(stack: RunningStack, client: openai.OpenAI) -> None:
    whole = chat(client, QUESTIONS[3], temperature=0, max_tokens=100)
    chunks = []
    for chunk in chat(client, QUESTIONS[3], temperature=0, max_tokens=100, stream=True):
        chunks.append(chunk.choices[0].delta.content or "")
        if len(chunks) == 10:
            stack.kill_worker()
    assert len(chunks) > 10
    assert "".join(chunks) == whole.choices[0].message.content


@pytest.mark.parametrize(
    "adjusted",
    [
        {},
        {
            "presence_penalty": 0.5,
            "frequency_penalty": 0.7,
            "extra_body": {"repetition_penalty": 1.1},
            "logit_bias": {"40": 1.5, "300": -3},
        },
    ],
    ids=["plain", "penalties"],
)
def test_a_killed_worker_loses_no_token_of_any_choice(
    stack: RunningStack, client: openai.OpenAI, adjusted: dict[str, Any]
) -> None:
    fields = {"temperature": 1.0, "seed": 7, "n": 4, "max_tokens": 100} | adjusted
    whole = chat(client, QUESTIONS[3], **fields)
    texts, killed = ["", "", "", ""], False
    for chunk in chat(client, QUESTIONS[3], stream=True, **fields):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if not killed and all(texts):
            stack.kill_worker()
            killed = True
    assert killed
    assert texts == [choice.message.content for choice in whole.choices]


def test_beam_search_over_http(stack: RunningStack, reference: tuple) -> None:
    """n of best_of beams for two prompts in one request, and the text of transformers."""
    prompts = ["Once upon a time", "The fox"]
    model, tokenizer = reference
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        made = model.generate(
            **ids, num_beams=4, num_return_sequences=2, max_new_tokens=20, do_sample=False
        )
        outputs = made[:, ids["input_ids"].shape[1] :]
        expected += tokenizer.batch_decode(outputs, skip_special_tokens=True)
    url = f"{stack.url}/v1/completions"
    body = {"prompt": prompts, "use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 20}
    made = httpx.post(url, json=body, timeout=60).json()
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in made["choices"]] == expected
    stopped = httpx.post(url, json={**body, "stop": ["x"]}, timeout=60)
    assert stopped.status_code == 400
    assert stopped.json()["error"]["param"] == "stop"
