"""Fields beyond the usual ones, through the whole stack with the embedded model."""

from typing import Any

import openai
import pytest

from pagewire.models import EMBEDDED_NAME
from pagewire.packing import unpack
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.stack_process import RunningStack

HELLO = [{"role": "user", "content": "Hello! Who are you?"}]


def chat(client: openai.OpenAI, messages: Any = HELLO, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=EMBEDDED_NAME, messages=messages, temperature=0, **fields
    )


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(model=EMBEDDED_NAME, prompt=prompt, temperature=0, **fields)


def long_chat(words: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "fox " * words}]


def test_a_context_that_is_too_long_is_refused_in_the_words_of_openai(
    client: openai.OpenAI,
) -> None:
    length = client.models.retrieve(EMBEDDED_NAME).max_model_len  # type: ignore[attr-defined]
    for call, part, requested, counts in (
        (lambda: chat(client, max_tokens=length), "messages", "", f"{length} in the completion"),
        (
            lambda: chat(client, max_completion_tokens=length),
            "messages",
            "",
            "max_completion_tokens",
        ),
        (lambda: complete(client, "fox", max_tokens=length), "prompt", "", "in the completion"),
        (lambda: complete(client, [5] * length), "prompt", f"{length + 16}", f"{length} in the"),
        (
            lambda: complete(client, ["fox", "fox " * length]),
            "prompt",
            "more than ",
            "in the prompt at index 1",
        ),
        (lambda: chat(client, long_chat(length * 2)), "messages", "more than ", "in the messages"),
        # Large enough for a helper process.
        (lambda: chat(client, long_chat(20_000)), "messages", "more than ", "in the messages"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            call()
        error = refused.value
        assert (error.code, error.type) == ("context_length_exceeded", "invalid_request_error")
        assert error.param == part
        words = f"This model's maximum context length is {length} tokens. However, you requested "
        assert error.body["message"].startswith(words + requested)  # type: ignore[index]
        assert counts in error.message
        assert "context_length_exceeded" in str(error), "LangChain looks for it"
        assert f"Please reduce the length of the {part}" in error.message


def test_the_model_continues_the_last_message(client: openai.OpenAI) -> None:
    whole = chat(client, max_tokens=40).choices[0].message.content
    words = whole.split(" ")
    begun = " ".join(words[: len(words) // 2])
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    rest = chat(client, messages, max_tokens=40, extra_body=extra).choices[0].message.content
    assert whole.startswith(begun + rest[:8])
    assert rest[:1] == " "


def test_special_tokens_are_shown_on_request(client: openai.OpenAI) -> None:
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    hidden = chat(client, max_tokens=60).choices[0]
    full = chat(client, max_tokens=60, extra_body=shown).choices[0]
    assert hidden.finish_reason == full.finish_reason == "stop"
    assert full.message.content.startswith(hidden.message.content)
    assert full.message.content.removeprefix(hidden.message.content).startswith("<|")


def test_a_prompt_is_cut_to_its_last_tokens(client: openai.OpenAI) -> None:
    cut = {"truncate_prompt_tokens": 4}
    answer = complete(client, [5, 6, 7, 8, 9, 10], max_tokens=8, extra_body=cut)
    assert answer.usage.prompt_tokens == 4
    assert answer.choices[0].text == complete(client, [7, 8, 9, 10], max_tokens=8).choices[0].text
    cut = {"truncate_prompt_tokens": 4, "truncation_side": "right"}
    answer = complete(client, [5, 6, 7, 8, 9, 10], max_tokens=8, extra_body=cut)
    assert answer.choices[0].text == complete(client, [5, 6, 7, 8], max_tokens=8).choices[0].text
    length = client.models.retrieve(EMBEDDED_NAME).max_model_len  # type: ignore[attr-defined]
    fitting = {"truncate_prompt_tokens": -1}
    answer = chat(client, long_chat(length * 2), max_tokens=9, extra_body=fitting)
    assert answer.usage.prompt_tokens == length - 9


def test_a_template_of_a_request_needs_the_setting(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--trust-request-chat-template") as refused:
        chat(client, extra_body={"chat_template": "{{ messages }}"})
    assert refused.value.param == "chat_template"


def test_a_killed_worker_changes_no_token_id(stack: RunningStack, client: openai.OpenAI) -> None:
    asked = {"max_tokens": 100, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    whole = chat(client, **asked)
    prompt, ids, text = [], [], ""
    for chunk in chat(client, stream=True, **asked):
        prompt += getattr(chunk, "prompt_token_ids", None) or []
        ids += getattr(chunk.choices[0], "token_ids", None) or []
        text += chunk.choices[0].delta.content or ""
        if len(ids) == 10:
            stack.kill_worker()
    assert len(ids) == 100
    assert ids == whole.choices[0].token_ids
    assert prompt == whole.prompt_token_ids
    assert text == whole.choices[0].message.content


def test_token_ids_of_prompts_over_http_and_grpc(
    client: openai.OpenAI, stub: inference_pb2_grpc.InferenceStub
) -> None:
    over_http = complete(client, "A fox", max_tokens=3, extra_body={"return_token_ids": True})
    ids = stub.Tokenize(pb.TokenizeRequest(text="A fox")).token_ids
    assert over_http.choices[0].prompt_token_ids == list(ids)
    request = pb.GenerateRequest(prompt="A fox", return_prompt_token_ids=True)
    request.sampling.temperature, request.stop.max_tokens = 0, 3
    responses = list(stub.Generate(request))
    assert [unpack(r.prompt.token_ids).tolist() for r in responses if r.HasField("prompt")] == [ids]
    tokens = [token for response in responses for token in response.token_ids]
    assert tokens == over_http.choices[0].token_ids


def test_an_empty_text_is_refused_only_if_it_has_no_tokens(client: openai.OpenAI) -> None:
    """As over gRPC: the tokenizer of this model adds no special token to a text."""
    for prompt, name in (("", "prompt"), (["fox", ""], "prompt at index 1")):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, prompt, max_tokens=2)
        assert refused.value.body["message"] == f"{name} is empty; give at least one token"  # type: ignore[index]
        assert refused.value.param == "prompt"
