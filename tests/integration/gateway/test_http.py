"""Answers over HTTP, with a gateway process in front of a scripted scheduler."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio

from support.processes.gateway_process import GatewayProcess, raw_request, ready_gateway
from support.scripted.in_process_gateway import in_process_gateway
from support.scripted.scripted_scheduler import STOP_STRING, ScriptedScheduler, expected_text
from support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEED = 11


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def only_peer() -> AsyncIterator[ScriptedScheduler]:
    peer = ScriptedScheduler()
    yield peer
    await peer.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(only_peer: ScriptedScheduler) -> AsyncIterator[GatewayProcess]:
    """A gateway in front of this scheduler."""
    async with ready_gateway(await only_peer.start(), max_body_bytes=1 << 20) as process:
        yield process


@pytest.fixture
def peer(only_peer: ScriptedScheduler) -> ScriptedScheduler:
    """The scheduler, without traces of the previous test."""
    only_peer.step = 0.001
    only_peer.submitted.clear()
    only_peer.aborted.clear()
    return only_peer


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def http(served: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, timeout=20) as client:
        yield client


async def test_openai_client_without_a_stream(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["scripted"]
    chat = await client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "one two"}],
        max_completion_tokens=9,
        seed=SEED,
    )
    assert chat.object == "chat.completion"
    assert chat.choices[0].message.content == expected_text("one two", SEED, 9)
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (2, 9)
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 1
    text = await client.completions.create(model="scripted", prompt="stop_at=7", seed=SEED)
    assert text.choices[0].text == expected_text("stop_at=7", SEED, 7)
    assert text.choices[0].finish_reason == "stop"
    assert text.choices[0].model_dump()["stop_reason"] == STOP_STRING


async def test_openai_client_streams(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=24,
        seed=SEED,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected_text("hello", SEED, 24)
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        "length"
    ]
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 25


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts(client: openai.AsyncOpenAI, stream: bool) -> None:
    """Each prompt is a choice; token ids are prompts too."""
    for prompts, names in ((["a b", "c"], ["a b", "c"]), ([[5, 6], [7]], ["5 6", "7"])):
        made = await client.completions.create(
            model="scripted", prompt=prompts, max_tokens=8, seed=SEED, stream=stream
        )
        texts = {0: "", 1: ""}
        if stream:
            async for chunk in made:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        else:
            texts = {choice.index: choice.text for choice in made.choices}
            assert made.usage.prompt_tokens == 3
            assert made.usage.completion_tokens == 16
        assert texts == {i: expected_text(name, SEED, 8) for i, name in enumerate(names)}


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_have_consecutive_seeds(
    client: openai.AsyncOpenAI, peer: ScriptedScheduler, stream: bool
) -> None:
    """Choice i of n equals the answer to the prompt alone with seed + i. The prompt counts once."""
    made = await client.completions.create(
        model="scripted",
        prompt=["a b", "c"],
        n=3,
        max_tokens=8,
        seed=2**63 - 2,
        stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    texts: dict[int, str] = {}
    if stream:
        async for chunk in made:
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
    else:
        usage = made.usage
        texts = {choice.index: choice.text for choice in made.choices}
    seeds = [2**63 - 2, 2**63 - 1, -(2**63)]
    wanted = [expected_text(prompt, seed, 8) for prompt in ("a b", "c") for seed in seeds]
    assert texts == dict(enumerate(wanted))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 48, 51)
    assert usage.prompt_tokens_details.cached_tokens == 1
    assert len({request.request_id for request in peer.submitted}) == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_choices(client: openai.AsyncOpenAI, stream: bool) -> None:
    made = await client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "one two"}],
        n=3,
        max_tokens=9,
        seed=SEED,
        stream=stream,
    )
    texts, roles, reasons = ["", "", ""], ["", "", ""], ["", "", ""]
    if stream:
        async for chunk in made:
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
            reasons[choice.index] += choice.finish_reason or ""
    else:
        assert [choice.index for choice in made.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in made.choices]
        roles = [choice.message.role for choice in made.choices]
        reasons = [choice.finish_reason for choice in made.choices]
    assert texts == [expected_text("one two", SEED + i, 9) for i in range(3)]
    assert roles == ["assistant"] * 3
    assert reasons == ["length"] * 3


async def test_a_stream_has_server_sent_events(http: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 2, "seed": SEED}
    response = await http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "usage" not in chunks[0]
    assert "".join(c["choices"][0]["text"] for c in chunks) == expected_text("x", SEED, 2)


@pytest.mark.parametrize(
    ("code", "status", "kind", "param"),
    [
        (3, 400, "invalid_request_error", "prompt"),
        (8, 429, "rate_limit_error", "prompt"),
        (13, 500, "server_error", "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_has_its_own_status(
    http: httpx.AsyncClient, code: int, status: int, kind: str, param: str, stream: bool
) -> None:
    body = {"prompt": f"fail={code}", "stream": stream}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["param"]) == (kind, param)
    assert error["message"] == "scripted failure"
    assert ("retry-after" in response.headers) == (status == 429)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_all_schedulers_hand_back_gets_503(stream: bool) -> None:
    async with in_process_gateway(ScriptedScheduler(), resume_seconds=0.3) as http:
        response = await http.post("/v1/completions", json={"prompt": "fail=14", "stream": stream})
    assert response.status_code == 503
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("server_error", None)
    assert error["message"] == (
        "no scheduler of 'scripted' with a ready worker was there for 0.3 s; retry"
    )
    assert "retry-after" in response.headers


@pytest.mark.parametrize(
    ("fields", "param"), [({"best_of": 2}, "best_of"), ({"best_of": 2, "logprobs": 1}, "logprobs")]
)
async def test_log_probabilities_for_best_of_have_its_name(
    http: httpx.AsyncClient, fields: dict[str, int], param: str
) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "scores=0", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param} is not possible")


async def test_a_failure_within_a_stream_is_its_last_event(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI, peer: ScriptedScheduler
) -> None:
    peer.step = 0.01
    prompt = "fail=13 fail_at=5"
    response = await http.post("/v1/completions", json={"prompt": prompt, "stream": True})
    assert response.status_code == 200
    last = response.text.rstrip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["message"] == "scripted failure"
    stream = await client.completions.create(model="scripted", prompt=prompt, stream=True)
    with pytest.raises(openai.APIError, match="scripted failure"):
        async for _ in stream:
            pass


async def test_a_request_past_its_deadline_is_not_retried(
    http: httpx.AsyncClient, served: GatewayProcess, peer: ScriptedScheduler
) -> None:
    body = {"prompt": "fail=4", "deadline_ms": 700}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    # Minus the time since the request's arrival.
    assert 600 < peer.submitted[0].deadline_ms <= 700
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as retrying:
        with pytest.raises(openai.InternalServerError):
            await retrying.completions.create(model="scripted", prompt="fail=4")
    assert len(peer.submitted) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_aborts_the_request(
    served: GatewayProcess, peer: ScriptedScheduler, stream: bool
) -> None:
    peer.step = 0.01
    reader, writer = await raw_request(
        served.url, {"prompt": ["x", "y"], "stream": stream, "max_tokens": 3000}
    )
    if stream:
        await reader.readuntil(b"data: ")
    await eventually(lambda: peer.running == 2)
    writer.close()
    await eventually(lambda: len(peer.aborted) == 2, 2.0)
    assert peer.running == 0


async def test_a_slow_reader_gets_everything(
    served: GatewayProcess, peer: ScriptedScheduler
) -> None:
    """Its connection fills up. Deltas merge into fewer chunks, and no text is lost."""
    peer.step = 0.0
    prompts, tokens = [f"prompt {i}" for i in range(128)], 400
    body = {"prompt": prompts, "stream": True, "max_tokens": tokens, "seed": SEED}
    reader, writer = await raw_request(served.url, body)
    await eventually(lambda: peer.submitted and peer.running == 0, 30)
    texts, chunks = [""] * len(prompts), 0
    while (line := (await asyncio.wait_for(reader.readline(), 20)).decode()) != "data: [DONE]\n":
        if line.startswith("data: "):
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            texts[choice["index"]] += choice["text"]
            chunks += 1
    assert texts == [expected_text(prompt, SEED, tokens) for prompt in prompts]
    assert chunks < 0.8 * tokens * len(prompts), (
        "every delta became a chunk: the reader was not slow"
    )
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_failure_of_one_prompt_ends_the_request(
    http: httpx.AsyncClient, peer: ScriptedScheduler, stream: bool
) -> None:
    peer.step = 0.01
    body = {"prompt": ["long", "fail=13 fail_at=3"], "max_tokens": 3000, "stream": stream}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == (200 if stream else 500)
    assert "scripted failure" in response.text
    await eventually(lambda: len(peer.aborted) == 1 and peer.running == 0, 2.0)


async def test_a_body_that_is_too_large_is_refused_and_read(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"prompt": "x" * (8 << 20)})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert (await http.get("/healthz")).status_code == 200
