"""From bodies to jobs: the requests made of a body, and bounds on its content."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.errors import RequestError
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsing.job_parser import JobParser, node_bound
from support.jobs import requests_of

MODELS = {"m": ServedModel(4096)}
SMALL = BodyLimits(
    max_json_nodes=600, max_messages=30, max_template_bytes=100, max_template_nodes=9
)


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def test_the_request_made_of_a_chat() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "name": "ann",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": ""},
        ],
        temperature=0,
        top_k=5,
        seed=-9,
        stop="x",
        stop_token_ids=[7],
        min_tokens=2,
        ignore_eos=True,
        include_stop_str_in_output=True,
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
        priority=4,
        cache_salt="tenant",
        deadline_ms=2500,
        skip_special_tokens=False,
        add_special_tokens=True,
        truncate_prompt_tokens=-1,
        chat_template="{{ messages }}",
        documents=[{"title": "t", "text": "x"}, {}],
    )
    job = JobParser(BodyLimits()).parse("chat", body, {"m": ServedModel(100)})
    (request,) = requests_of(job)
    messages = [(each.role, each.content, each.name) for each in request.chat.messages]
    assert messages == [("system", "be brief", ""), ("user", "a\nb", "ann"), ("assistant", "", "")]
    assert request.chat.HasField("add_generation_prompt")
    assert not request.chat.add_generation_prompt
    assert request.chat.template_kwargs["enable_thinking"] is False
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (
        0,
        5,
        -9,
    )
    assert request.sampling.HasField("temperature")
    assert not request.stop.HasField("max_tokens")
    assert (list(request.stop.stop), list(request.stop.stop_token_ids)) == (["x"], [7])
    assert request.stop.ignore_eos
    assert request.stop.include_stop_str_in_output
    assert (request.stop.min_tokens, request.priority, request.model) == (2, 4, "m")
    assert request.cache_salt == "tenant"
    assert request.deadline_ms == 2500
    assert request.HasField("skip_special_tokens")
    assert not request.skip_special_tokens
    assert request.add_special_tokens
    assert request.truncate_prompt_tokens == 99, "what leaves room for one token"
    assert request.chat.chat_template == "{{ messages }}"
    assert [dict(each) for each in request.chat.documents] == [{"title": "t", "text": "x"}, {}]
    assert not request.chat.continue_final_message


def test_a_continued_message_has_no_generation_prompt() -> None:
    job = JobParser(BodyLimits()).parse("chat", chat(continue_final_message=True), MODELS)
    (request,) = requests_of(job)
    assert request.chat.continue_final_message
    assert request.chat.HasField("add_generation_prompt")
    assert not request.chat.add_generation_prompt


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3, "max_tokens": 2}, [3, 4, 5]),
        ({"truncate_prompt_tokens": 9, "max_tokens": 2}, [1, 2, 3, 4, 5]),
        (
            {"truncate_prompt_tokens": 3, "truncation_side": "right", "max_tokens": 2},
            [1, 2, 3],
        ),
        ({"truncate_prompt_tokens": -1, "max_tokens": 6}, [2, 3, 4, 5]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10}, [5]),
        ({"max_tokens": 2}, [1, 2, 3, 4, 5]),
    ],
)
def test_the_last_tokens_of_a_prompt_are_kept(fields: dict[str, int], kept: list[int]) -> None:
    body = json.dumps({"prompt": [1, 2, 3, 4, 5], **fields}).encode()
    job = JobParser(BodyLimits()).parse(
        "completions", body, {"m": ServedModel(10 if "-" in str(fields) else 99)}
    )
    (request,) = requests_of(job)
    assert list(request.prompt_token_ids.ids) == kept
    assert job.common[0].tokens == len(kept)


def test_an_estimate_counts_the_tokens_that_are_kept() -> None:
    body = json.dumps({"prompt": "word " * 500, "truncate_prompt_tokens": 7}).encode()
    assert JobParser(BodyLimits()).parse("completions", body, MODELS).common[0].tokens == 7


def test_the_requests_made_of_several_prompts() -> None:
    body = json.dumps({"prompt": [[1, 2], [3]], "cache_salt": "tenant"}).encode()
    job = JobParser(BodyLimits()).parse("completions", body, {"m": ServedModel(100)})
    requests = requests_of(job)
    assert [list(r.prompt_token_ids.ids) for r in requests] == [[1, 2], [3]]
    assert [r.stop.max_tokens for r in requests] == [16, 16]
    assert [r.cache_salt for r in requests] == ["tenant", "tenant"]
    seeds = {r.sampling.seed for r in requests}
    assert len(seeds) == 2, "each prompt without a seed gets its own"
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({r.request_id for r in requests}) == 2


@pytest.mark.parametrize(
    ("body", "field", "remedy"),
    [
        (chat(chat_template_kwargs={"a": [0] * 9}), "chat_template_kwargs", "--max-template-nodes"),
        (chat(chat_template_kwargs={"a": "b" * 100}), "chat_template_kwargs", "--max-template-by"),
        (chat(messages=[{"role": "user", "content": ""}] * 31), "messages", "give 30"),
        (chat(tools=[[]] * 600), "", "--max-json-nodes|--max-messages"),
        (chat(metadata={str(n): "v" for n in range(1025)}), "", "at most 600"),
        (chat(cache_salt="s" * 257), "cache_salt", "256"),
    ],
)
def test_a_body_above_a_bound_is_refused(body: bytes, field: str, remedy: str) -> None:
    with pytest.raises(RequestError) as refused:
        JobParser(SMALL).parse("chat", body, MODELS)
    assert refused.value.field == field
    assert any(part in refused.value.message for part in remedy.split("|"))


def test_token_ids_beyond_the_length_of_the_model_are_refused() -> None:
    body = json.dumps({"prompt": [[1], [7] * 4096]}).encode()
    with pytest.raises(RequestError, match="4096 in the prompt at index 1, 16 in the"):
        JobParser(BodyLimits()).parse("completions", body, MODELS)


@given(
    st.recursive(
        st.none() | st.integers() | st.text('[{,"\\x'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('[{,"\\'), inner),
    )
)
def test_every_json_value_is_counted(value: Any) -> None:
    def count(value: Any) -> int:
        items = value.values() if isinstance(value, dict) else value
        return 1 + sum(map(count, items)) if isinstance(value, dict | list) else 1

    nodes = count({"tools": value})
    body = json.dumps({"tools": value}).encode()
    assert node_bound(body) >= nodes
    limits = BodyLimits(max_json_nodes=nodes - 1)
    with pytest.raises(RequestError, match=f"at most {nodes - 1} are allowed"):
        JobParser(limits).parse("completions", body, MODELS)


@pytest.mark.parametrize(("max_tokens", "requested"), [(0, 11), (1, 11), (5, 15)])
def test_a_prompt_as_long_as_the_context_is_too_long_by_its_own_message(
    max_tokens: int, requested: int
) -> None:
    """Without output, too, a prompt leaves room for one token."""
    body = json.dumps({"prompt": [1] * 10, "echo": True, "max_tokens": max_tokens}).encode()
    with pytest.raises(RequestError, match=f"length is 10 .* you requested {requested} tokens"):
        JobParser(BodyLimits()).parse("completions", body, {"m": ServedModel(10)})


def test_two_names_of_the_reasoning_must_agree() -> None:
    def read(**fields: str) -> None:
        messages = [{"role": "assistant", "content": "a", **fields}]
        JobParser(BodyLimits()).parse("chat", chat(messages=messages), MODELS)

    read(reasoning="so", reasoning_content="so")
    with pytest.raises(RequestError) as refused:
        read(reasoning="so", reasoning_content="no")
    assert refused.value.field == "messages[0].reasoning"
