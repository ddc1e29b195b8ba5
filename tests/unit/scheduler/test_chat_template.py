"""Chat templates: rendering, refusals, the sandbox."""

import pytest

from pagewire.errors import Code, RequestError
from pagewire.scheduler.text.chat_template import ChatTemplate
from pagewire.scheduler.text.tokenizer import (
    Tokenizer,
)


def test_chat_template_renders(byte_level: Tokenizer) -> None:
    assert byte_level.chat_template is not None
    text = byte_level.chat_template.render([{"role": "user", "content": "hi"}], True, {})
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def test_chat_template_refusals_reach_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.render([], False, {})
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.field == "messages"


@pytest.mark.parametrize("number", [0, 10**7, "many", None])
def test_errors_of_a_template_are_refusals(number: object) -> None:
    template = ChatTemplate("{% for i in range(n) %}{{ 9 // n }}{% endfor %}{{ 9 // n }}", {})
    with pytest.raises(RequestError, match="refuses these messages"):
        template.render([], True, {"n": number})


def test_chat_template_cannot_reach_the_interpreter() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(RequestError):
        template.render([], False, {})


def test_chat_template_sees_special_tokens_and_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ enable_thinking }}", {"bos_token": "<s>"})
    assert template.render([], True, {"enable_thinking": False}) == "<s>False"
