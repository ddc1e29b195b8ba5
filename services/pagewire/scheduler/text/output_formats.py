"""The formats in which a model writes tool calls and reasoning, found from its chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pagewire.errors import RequestError
from pagewire.output_formats import REASONING_FORMATS, ReasoningFormat
from pagewire.v1 import inference_pb2 as pb

# Texts in a template that identify the format. A template must have all texts of an entry; the
# first such entry counts.
_TOOL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|start|>", "<|channel|>commentary")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("seed_oss", ("<seed:tool_call>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>", "</tool_call>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|tool_call|>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("pythonic", ("func_name1(params_name1=params_value1",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": dictionary of argument name and its value',)),
)
_REASONING_MARKS = {
    "harmony": ("<|start|>", "<|channel|>analysis"),
    "seed_oss": ("<seed:think>",),
    "mistral": ("[THINK]",),
    "kimi": ("◁think▷",),
    "command_a": ("<|START_THINKING|>",),
    "granite": ("Here is my thought process:",),
    "think": ("</think>",),
}
# Variables that turn reasoning on and off, by template.
_THINKING = ("enable_thinking", "thinking")
# The last message of a conversation that is rendered to see what the template writes after it.
_QUESTION = "What is 6 times 7?"


class Template(Protocol):
    """A chat template; see ChatTemplate."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Jinja templates by name."""
        ...

    def render(self, messages: Any, add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        """The prompt of a conversation."""
        ...


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """Names of `pagewire.output_formats`, empty where there is none; see pb.Model for the rest."""

    tools: str = ""
    reasoning: str = ""
    reasoning_starts: tuple[pb.ReasoningStart, ...] = ()
    reasoning_end_token: int | None = None


def find_formats(
    template: Template | None,
    tool_parser: str,
    reasoning_parser: str,
    token_id: Any,
) -> OutputFormats:
    """The formats of a model. The settings are names of formats, `auto` or `none`.

    `token_id` returns the token that stands for a text, or None.
    """
    source = "\n".join(template.sources.values()) if template is not None else ""
    tools = detect_tools(source) if tool_parser == "auto" else tool_parser
    reasoning = detect_reasoning(source) if reasoning_parser == "auto" else reasoning_parser
    tools, reasoning = tools.removesuffix("none"), reasoning.removesuffix("none")
    if not reasoning or template is None:
        return OutputFormats(tools, reasoning)
    spec = REASONING_FORMATS[reasoning]
    return OutputFormats(
        tools,
        reasoning,
        _starts(template, spec),
        token_id(spec.ends[0]),
    )


def detect_tools(source: str) -> str:
    """The format of tool calls that a template shows; empty if it shows none that is known."""
    found = (name for name, marks in _TOOL_MARKS if all(mark in source for mark in marks))
    return next(found, "")


def detect_reasoning(source: str) -> str:
    """The format of reasoning that a template shows; empty if it shows none that is known."""
    found = (n for n, marks in _REASONING_MARKS.items() if all(mark in source for mark in marks))
    return next(found, "")


def _starts(template: Template, spec: ReasoningFormat) -> tuple[pb.ReasoningStart, ...]:
    """How reasoning begins after prompts of the template: by default, turned on, turned off."""
    if spec.channels:  # what ends reasoning ends all messages, also those of the prompt
        return (pb.REASONING_START_BY_MODEL,) * 3
    default, on, off = (_prompt(template, thinking) for thinking in (None, True, False))
    starts = [_start(prompt, spec) for prompt in (default, on, off)]
    # A template that turns reasoning off may do so without tags.
    if starts[2] == pb.REASONING_START_BY_MODEL and "" not in (on, off) and on != off:
        starts[2] = pb.REASONING_START_NONE
    return tuple(starts)


def _prompt(template: Template, thinking: bool | None) -> str:
    """A prompt of the template; empty if it refuses the conversation."""
    variables: dict[str, Any] = {"tools": None, "documents": None}
    if thinking is not None:
        variables |= dict.fromkeys(_THINKING, thinking)
    try:
        return template.render([{"role": "user", "content": _QUESTION}], True, variables)
    except RequestError:
        return ""


def _start(prompt: str, spec: ReasoningFormat) -> pb.ReasoningStart:
    """How reasoning begins after a prompt, by the tags at its end."""
    ending = prompt.rpartition(_QUESTION)[2]
    opened = max(ending.rfind(tag) for tag in spec.begins)
    closed = max(ending.rfind(tag) for tag in spec.ends)
    if closed > opened:
        return pb.REASONING_START_NONE
    return pb.REASONING_START_BY_MODEL if opened < 0 else pb.REASONING_START_IN_PROMPT
