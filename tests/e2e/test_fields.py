"""Fields beyond the usual ones, through the whole stack with the embedded model."""

from typing import Any

import openai
import pytest

from pagewire.models import EMBEDDED_NAME

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
        (lambda: complete(client, "fox", max_tokens=length), "prompt", "", "in the completion"),
        (lambda: complete(client, [5] * length), "prompt", f"{length + 16}", f"{length} in the"),
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
        assert f"Please reduce the length of the {part}" in error.message
