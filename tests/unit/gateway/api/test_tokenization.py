"""/tokenize and /detokenize: the requests to a scheduler, and the form of the response."""

import json
from typing import Any

import pytest

from pagewire.errors import RequestError
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.tokenization import TextCall
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsing.job_parser import JobParser
from pagewire.v1 import inference_pb2 as pb

MODELS = {"m": ServedModel(4096)}
PARSER = JobParser(BodyLimits(max_messages=2))
CHAT = [{"role": "user", "content": "Hi"}]


def tokenize(**fields: Any) -> pb.TokenizeRequest:
    call = PARSER.text_call("tokenize", json.dumps(fields).encode(), MODELS)
    assert (call.method, call.model, call.answer) == ("Tokenize", "m", "tokens")
    return pb.TokenizeRequest.FromString(call.request)


def refusal(route: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        PARSER.text_call(route, json.dumps(fields).encode(), MODELS)
    return refused.value


def test_a_prompt() -> None:
    assert tokenize(prompt="Hi") == pb.TokenizeRequest(model="m", text="Hi")
    asked = tokenize(model="m", prompt="", add_special_tokens=False, return_token_strs=True)
    assert asked == pb.TokenizeRequest(
        model="m", text="", add_special_tokens=False, return_token_strs=True
    )


def test_a_chat_is_rendered_as_the_chat_endpoint_renders_it() -> None:
    asked = tokenize(
        messages=CHAT,
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
        add_special_tokens=True,
        tools=[],
        continue_final_message=False,
    )
    assert [(m.role, m.content) for m in asked.chat.messages] == [("user", "Hi")]
    assert asked.chat.HasField("add_generation_prompt")
    assert not asked.chat.add_generation_prompt
    assert dict(asked.chat.template_kwargs) == {"enable_thinking": False}
    assert asked.add_special_tokens
    assert not tokenize(messages=CHAT).HasField("add_special_tokens")


def test_the_tokens_of_a_message_are_counted_as_they_would_be_sent() -> None:
    def count(**fields: Any) -> pb.TokenizeRequest:
        body = json.dumps({"messages": CHAT, **fields}).encode()
        return pb.TokenizeRequest.FromString(PARSER.text_call("count_tokens", body, MODELS).request)

    assert not count().HasField("add_special_tokens")
    assert count(add_special_tokens=True).add_special_tokens
    refused = refusal("count_tokens", messages=CHAT, truncate_prompt_tokens=3)
    assert refused.field == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 2),
        ("min_p", 1.5),
        ("n", 3),
        ("max_tokens", 0),
        ("stop", ["a"]),
        ("stop_sequences", [""]),
        ("logit_bias", {"x": 1}),
        ("allowed_token_ids", []),
        ("prompt_logprobs", 1),
        ("return_token_ids", True),
        ("truncation_side", "left"),
        ("output_config", {"format": {"type": "xml"}}),
    ],
)
def test_parameters_are_checked_where_tokens_of_a_message_are_counted(
    field: str, value: object
) -> None:
    body = {"messages": CHAT, field: value}
    refused = refusal("count_tokens", **body)
    with pytest.raises(RequestError) as of_answer:
        PARSER.parse("messages", json.dumps({"max_tokens": 5, **body}).encode(), MODELS)
    assert refused.field.startswith(field)
    assert refused.field == of_answer.value.field


def test_a_chat_may_be_rendered_otherwise() -> None:
    chat = tokenize(
        messages=CHAT,
        continue_final_message=True,
        chat_template="{{ messages }}",
        documents=[{"title": "t"}],
    ).chat
    assert chat.continue_final_message
    assert not chat.add_generation_prompt
    assert chat.chat_template == "{{ messages }}"
    assert [dict(each) for each in chat.documents] == [{"title": "t"}]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": CHAT}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": CHAT * 3}, "messages"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a", "chat_template": "x"}, "chat_template"),
        (
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ({"prompt": "a", "model": "other"}, "model"),
    ],
)
def test_what_is_not_valid_is_named(fields: dict[str, Any], field: str) -> None:
    assert refusal("tokenize", **fields).field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "tokens"),
        ({"tokens": [-1]}, "tokens[0]"),
        ({"tokens": [1.5]}, "tokens[0]"),
    ],
)
def test_tokens_that_are_not_valid_are_named(fields: dict[str, Any], field: str) -> None:
    assert refusal("detokenize", **fields).field == field


def test_unknown_fields_are_named() -> None:
    body = b'{"prompt": "a", "temperature": 1, "mm_processor_kwargs": {}}'
    assert PARSER.text_call("tokenize", body, MODELS).ignored == ("temperature",)
    body = b'{"tokens": [1], "skip_special_tokens": false}'
    assert PARSER.text_call("detokenize", body, MODELS).ignored == ("skip_special_tokens",)


def test_tokens_keep_the_text_of_special_ones() -> None:
    call = PARSER.text_call("detokenize", b'{"tokens": [5, 300]}', MODELS)
    assert call.method == "Detokenize"
    assert pb.DetokenizeRequest.FromString(call.request) == pb.DetokenizeRequest(
        model="m", token_ids=[5, 300], skip_special_tokens=False
    )
    response = pb.DetokenizeResponse(text='a "b" 🙂').SerializeToString()
    assert json.loads(call.body(response, 9)) == {"prompt": 'a "b" 🙂'}


@pytest.mark.parametrize("count", [0, 1, 40_000])
def test_an_answer_has_the_count_and_every_token(count: int) -> None:
    ids = list(range(count))
    call = TextCall("Tokenize", "m", b"", "tokens")
    response = pb.TokenizeResponse(token_ids=ids).SerializeToString()
    assert json.loads(call.body(response, 4096)) == {
        "count": count,
        "max_model_len": 4096,
        "tokens": ids,
        "token_strs": None,
    }
