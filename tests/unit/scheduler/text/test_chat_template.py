"""Chat templates: rendering, refusals, the sandbox, and rendering without torch."""

import subprocess
import sys

import pytest

from pagewire.errors import Code, RequestError
from pagewire.scheduler.text.chat_template import RESERVED, ChatTemplate
from pagewire.scheduler.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}


def test_chat_template_renders(byte_level: Tokenizer) -> None:
    assert byte_level.chat_template is not None
    text = byte_level.chat_template.render([USER], True, {})
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


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ (namespace.__init__).__globals__ }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{% set messages[0].role = 'system' %}",
    ],
)
def test_chat_template_cannot_reach_the_interpreter(source: str) -> None:
    try:
        template = ChatTemplate(source, {})
    except ValueError:
        return  # not even syntax
    with pytest.raises(RequestError):
        template.render([USER], False, {})


def test_chat_template_sees_special_tokens_and_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ enable_thinking }}", {"bos_token": "<s>"})
    assert template.render([], True, {"enable_thinking": False}) == "<s>False"


def test_what_templates_of_models_use_is_there() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ {'b': 'ü<', 'a': 1} | tojson(indent=1) }}{{ strftime_now('%Y') | length }}"
    )
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "<ü>"}, USER]
    rendered = ChatTemplate(source, {}).render(chat, True, {})
    assert rendered == '"<ü>"{\n "b": "ü<",\n "a": 1\n}4'


def test_requests_with_tools_have_a_template_of_their_own() -> None:
    template = ChatTemplate(
        {"default": "plain {{ tools }}", "tool_use": "{{ tools[0].name }}", "rag": "unused"}, {}
    )
    assert template.render([], True, {}) == "plain None"
    assert template.render([], True, {}, tools=[{"name": "clock"}]) == "clock"
    assert template.render([], True, {"tools": [{"name": "from a variable"}]}) == "from a variable"
    one = ChatTemplate("{{ tools[0].name }} {{ documents[0].title }}", {})
    text = one.render([], True, {}, tools=[{"name": "a"}], documents=[{"title": "b", "text": ""}])
    assert text == "a b"


def test_templates_that_do_not_parse_are_named() -> None:
    with pytest.raises(ValueError, match="the model's chat template does not parse: line 2: "):
        ChatTemplate("\n{% for %}", {})
    with pytest.raises(ValueError, match="chat template 'rag' does not parse"):
        ChatTemplate({"default": "", "rag": "{{ x | no_such_filter }}"}, {})
    with pytest.raises(ValueError, match="chat templates a, b, and none of them is the default"):
        ChatTemplate({"b": "", "a": ""}, {})


def test_variables_with_the_names_of_arguments_would_change_the_rendering() -> None:
    """So `RESERVED` names them, and requests with them are refused."""
    from inspect import signature

    from transformers.utils.chat_template_utils import render_jinja_template

    named = set(signature(render_jinja_template).parameters) - {"kwargs", "tools", "documents"}
    assert named | {"messages"} == RESERVED


_FREE_OF_TORCH = """
import sys
sys.modules.update(dict.fromkeys({absent!r}))  # as if it were not installed
import pagewire.scheduler.server
from pagewire.scheduler.requests import text_helper
from pagewire.scheduler.text.chat_template import ChatTemplate

template = ChatTemplate("{{{{ messages[0].content }}}}", {{}})
print(template.render([{{"content": "hello"}}], True, {{}}))
print([name for name in ("torch", "triton", "tensorflow", "jax") if sys.modules.get(name)])
"""


@pytest.mark.parametrize("absent", [(), ("torch",)])
def test_the_scheduler_renders_without_torch(absent: tuple[str, ...]) -> None:
    """An installed torch is not imported; a missing torch causes no message."""
    ended = subprocess.run(
        [sys.executable, "-c", _FREE_OF_TORCH.format(absent=absent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.splitlines() == ["hello", "[]"], ended.stderr
    assert ended.stderr == ""
