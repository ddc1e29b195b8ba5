"""`prediction`: an answer in fewer steps, with the same bytes, and its tokens in `usage`."""

import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest

from pagewire.models import EMBEDDED_NAME
from pagewire.scheduler.requests.incoming_request import INLINE_TEXT_BYTES
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.stack_process import RunningStack, running_stack

STORY = "Tell me a story about a fox."
LENGTH = 100


@pytest.fixture(scope="module")
def speculating() -> Iterator[RunningStack]:
    with running_stack("--speculate", "suffix") as started:
        yield started


@pytest.fixture(params=["plain", "speculating"])
def either(request: pytest.FixtureRequest, stack: RunningStack) -> RunningStack:
    """A stack whose worker does not speculate, and one whose worker does."""
    return stack if request.param == "plain" else request.getfixturevalue("speculating")


def ask(stack: RunningStack, **fields: Any) -> dict[str, Any]:
    body = {
        "model": EMBEDDED_NAME,
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": LENGTH,
        "ignore_eos": True,
        "seed": 7,
        "temperature": 0.8,
        # Each has its own blocks, and so the tokens of a whole prompt.
        "cache_salt": str(time.perf_counter_ns()),
    }
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body | fields, timeout=60)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def prediction(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def counted(answer: dict[str, Any]) -> tuple[int, int]:
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"temperature": 0},
        {"logprobs": True, "top_logprobs": 2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"stop": ["\n\n", "the end", " and the"]},
        {"min_tokens": 20, "ignore_eos": False},
        {"max_completion_tokens": 33, "max_tokens": None},
        {"response_format": {"type": "json_object"}},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def asked(
    request: pytest.FixtureRequest, stack: RunningStack
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields, and the answer to them without a prediction."""
    return request.param, ask(stack, **request.param)


def test_the_answer_is_the_same_with_every_field(
    either: RunningStack, stack: RunningStack, asked: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    fields, want = asked
    assert "accepted_prediction_tokens" not in str(want["usage"])
    for content in (text(want), text(want)[:40] + " a purple cow" + text(want)[60:]):
        got = ask(either, **fields, **prediction(content))
        assert text(got) == text(want)
        choices = [answer["choices"][0] for answer in (got, want)]
        assert choices[0]["finish_reason"] == choices[1]["finish_reason"]
        assert got["usage"]["completion_tokens"] == want["usage"]["completion_tokens"]
        accepted, _ = counted(got)
        assert (accepted > got["usage"]["completion_tokens"] // 4) == (either is not stack)


def test_usage_counts_what_was_right_and_what_was_not(
    speculating: RunningStack, stack: RunningStack
) -> None:
    want = text(ask(speculating))
    accepted, rejected = counted(ask(speculating, **prediction(want)))
    # The last token of each step is drawn, not a draft.
    assert LENGTH * 3 // 4 <= accepted < LENGTH
    assert rejected < 8
    half = want[: len(want) // 2]
    accepted, rejected = counted(ask(speculating, **prediction(half + " xyzzy 42 0 1 2 3 4 5 6 7")))
    assert LENGTH // 3 <= accepted < LENGTH * 2 // 3
    assert 3 <= rejected < 30
    accepted, rejected = counted(ask(speculating, **prediction("xyzzy 42 " * 40)))
    assert accepted + rejected < 20  # no token of it occurred, so hardly any draft was tried
    assert counted(ask(speculating, **prediction(""))) == (0, 0)
    assert counted(ask(stack, **prediction(want))) == (0, 0)


def test_parts_are_one_text(speculating: RunningStack) -> None:
    want = text(ask(speculating))
    parts = [{"type": "text", "text": want[at : at + 30]} for at in range(0, len(want), 30)]
    assert counted(ask(speculating, **prediction(parts))) == counted(
        ask(speculating, **prediction(want))
    )


def test_each_choice_has_the_prediction(speculating: RunningStack) -> None:
    alone = [ask(speculating, seed=7 + i) for i in range(2)]
    both = ask(speculating, n=2, **prediction(text(alone[0])))
    contents = [choice["message"]["content"] for choice in both["choices"]]
    assert contents == [text(answer) for answer in alone]
    accepted, rejected = counted(both)
    one = counted(ask(speculating, **prediction(text(alone[0]))))
    assert accepted >= one[0]
    assert rejected > one[1]


def test_a_stream_ends_with_the_counts(speculating: RunningStack) -> None:
    want = text(ask(speculating))
    client = openai.OpenAI(base_url=f"{speculating.url}/v1", api_key="x", max_retries=0)
    chunks = list(
        client.chat.completions.create(
            model=EMBEDDED_NAME,
            messages=[{"role": "user", "content": STORY}],
            max_tokens=LENGTH,
            seed=7,
            temperature=0.8,
            stream=True,
            stream_options={"include_usage": True},
            prediction={"type": "content", "content": want},
            extra_body={"ignore_eos": True},
        )
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == want
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert (usage.completion_tokens_details.accepted_prediction_tokens or 0) > LENGTH // 2


def test_a_large_prediction_is_read_apart_and_one_that_is_too_long_is_refused(
    either: RunningStack, stack: RunningStack
) -> None:
    want = text(ask(stack))
    large = " together" * 1000 + want
    assert len(large) > INLINE_TEXT_BYTES
    got = ask(either, **prediction(large))
    assert text(got) == want
    assert (counted(got)[0] > LENGTH // 3) == (either is not stack)
    with pytest.raises(httpx.HTTPStatusError) as refused:
        ask(either, **prediction("one two three four " * 20_000))
    error = refused.value.response.json()["error"]
    assert error["param"] == "prediction"
    assert "the most of a sequence" in error["message"]


def test_grpc_takes_it_and_refuses_it_by_name(speculating: RunningStack) -> None:
    request = pb.GenerateRequest(
        prompt="Once upon a time",
        sampling=pb.SamplingParams(temperature=1, seed=3),
        stop=pb.StopConditions(max_tokens=60, ignore_eos=True),
        cache_salt="grpc",
    )
    with grpc.insecure_channel(speculating.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        want = list(stub.Generate(request))
        assert not want[-1].finish.usage.HasField("accepted_prediction_tokens")
        request.prediction = "".join(response.text for response in want)
        request.cache_salt = "another"
        got = list(stub.Generate(request))
        ids = [[i for response in each for i in response.token_ids] for each in (want, got)]
        assert ids[0] == ids[1]
        assert got[-1].finish.usage.accepted_prediction_tokens > 30
        request.sampling.Clear()
        request.sampling.temperature = 0
        request.stop.ClearField("ignore_eos")
        request.beam_search.width = 2
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "prediction and beam_search exclude each other" in refused.value.details()


def test_a_killed_worker_changes_no_byte(speculating: RunningStack) -> None:
    body = {
        "model": EMBEDDED_NAME,
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": 220,
        "ignore_eos": True,
        "seed": 11,
        "temperature": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    want, _ = _streamed(speculating, body, kill_after=None)
    edited = want[:300] + " and then " + want[330:]
    got, usage = _streamed(speculating, body | prediction(edited), kill_after=120)
    assert got == want
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 100


def _streamed(
    stack: RunningStack, body: dict[str, Any], kill_after: int | None
) -> tuple[str, dict[str, Any]]:
    """The text of a stream, and its usage. The worker is killed after a number of characters."""
    received, usage = "", {}
    url = f"{stack.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                received += choice["delta"].get("content") or ""
            if kill_after is not None and len(received) > kill_after:
                stack.kill_worker()
                kill_after = None
    assert kill_after is None
    return received, usage
