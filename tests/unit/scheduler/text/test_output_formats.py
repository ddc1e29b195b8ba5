"""The formats that a chat template shows."""

from typing import get_args, get_type_hints

import pytest

from pagewire.config import SchedulerConfig
from pagewire.output_formats import REASONING_FORMATS, TOOL_FORMATS
from pagewire.scheduler.text.chat_template import ChatTemplate
from pagewire.scheduler.text.output_formats import (
    detect_reasoning,
    detect_tools,
    find_formats,
)
from pagewire.v1 import inference_pb2 as pb

IN_PROMPT, BY_MODEL, NONE = (
    pb.REASONING_START_IN_PROMPT,
    pb.REASONING_START_BY_MODEL,
    pb.REASONING_START_NONE,
)
USER = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
# Written for these tests, each with typical parts of the templates of its models.
TEMPLATES = {
    "hermes": """{% if tools %}return each call within <tool_call></tool_call> tags:
<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}""",
    "qwen3_coder": """{% if tools %}<tool_call>\n<function=example>\n<parameter=first>\nvalue
</parameter>\n</function>\n</tool_call>{% endif %}""",
    "llama3_json": """{{ '{"name": function name, "parameters": dictionary of argument name and its
 value}'.replace("\\n", "") }}{% if call %}{{ "<|python_tag|>" + call }}{% endif %}""",
    "mistral": """{% if m.tool_calls %}{{ "[TOOL_CALLS]" }}{% endif %}[AVAILABLE_TOOLS]""",
    "pythonic": """answer as [func_name1(params_name1=params_value1, params_name2=value2...)]""",
    "deepseek_v3": """{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] +
 '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' }}""",
    "deepseek_v31": """{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool.name +
 '<｜tool▁sep｜>' }}""",
    "kimi_k2": """<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}""",
    "granite": """{{ "<|tool_call|>" + calls | tojson }}""",
    "glm45": """<tool_call>{function-name}\n<arg_key>{key}</arg_key>""",
    "seed_oss": """<seed:tool_call>\n<function=name>\n<parameter=key>""",
    "harmony": """<|start|>assistant{{ " to=functions." + call.name }}<|channel|>commentary json""",
    "": """{% for m in messages %}{{ m.content }}{% endfor %}""",
}


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_the_format_of_calls_is_detected(name: str, template: str) -> None:
    assert detect_tools(template.replace("\n value}", " value}")) == name


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("think", "{{ content.split('</think>')[-1] }}"),
        ("mistral", "[THINK]{{ thinking }}[/THINK]"),
        ("granite", "Here is my thought process: ... Here is my response:"),
        ("seed_oss", "<seed:think>{{ m.reasoning_content }}</seed:think>"),
        ("kimi", "◁think▷"),
        ("command_a", "<|START_THINKING|>"),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"),
        ("", "{{ m.content }}"),
    ],
)
def test_the_format_of_reasoning_is_detected(name: str, template: str) -> None:
    assert detect_reasoning(template) == name


@pytest.mark.parametrize(
    ("end", "starts"),
    [
        ("{{ '</think>' if old else '' }}", [BY_MODEL] * 3),
        ("<think>\n", [IN_PROMPT] * 3),
        (
            "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
            "{% endif %}",
            [BY_MODEL, BY_MODEL, NONE],
        ),
        (
            "{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}",
            [NONE, IN_PROMPT, NONE],
        ),
        (
            "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}",
            [IN_PROMPT, IN_PROMPT, NONE],
        ),
        (
            "{{ '</think>' if old else '' }}{% if thinking %}Think first.{% endif %}",
            [BY_MODEL, BY_MODEL, NONE],
        ),
        ("{{ raise_exception('</think>') }}", [BY_MODEL] * 3),
    ],
)
def test_how_reasoning_begins_is_seen_in_prompts(end: str, starts: list[pb.ReasoningStart]) -> None:
    system = "Think within <think> and </think>."
    template = ChatTemplate(f"{system}{USER}{{% if add_generation_prompt %}}{end}{{% endif %}}", {})
    found = find_formats(template, "auto", "auto", {"</think>": 9}.get)
    assert found.reasoning == "think"
    assert list(found.reasoning_starts) == starts
    assert found.reasoning_end_token == 9


def test_reasoning_in_a_channel_begins_with_the_model() -> None:
    """The tag that ends it also ends the messages of the prompt."""
    turns = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    )
    shown = "{% if call %}<|channel|>analysis<|message|><|channel|>commentary{% endif %}"
    template = ChatTemplate(f"{shown}{turns}<|start|>assistant", {})
    found = find_formats(template, "auto", "auto", {"<|end|>": 9}.get)
    assert (found.tools, found.reasoning) == ("harmony", "harmony")
    assert list(found.reasoning_starts) == [BY_MODEL] * 3
    assert found.reasoning_end_token == 9


def test_settings_come_before_what_is_detected() -> None:
    template = ChatTemplate(TEMPLATES["hermes"], {})
    found = find_formats(template, "mistral", "kimi", lambda _: None)
    assert (found.tools, found.reasoning, found.reasoning_end_token) == ("mistral", "kimi", None)
    found = find_formats(template, "none", "none", lambda _: None)
    assert (found.tools, found.reasoning) == ("", "")
    found = find_formats(None, "auto", "auto", lambda _: None)
    assert (found.tools, found.reasoning) == ("", "")


def test_the_settings_name_all_formats() -> None:
    hints = get_type_hints(SchedulerConfig)
    assert {*get_args(hints["tool_parser"])} - {"auto", "none"} == {*TOOL_FORMATS} - {"json"}
    assert {*get_args(hints["reasoning_parser"])} - {"auto", "none"} == {*REASONING_FORMATS}
