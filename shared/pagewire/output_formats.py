"""The formats in which models write tool calls and reasoning, as data.

Schedulers find the format of their model, gateways parse it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as JSON objects, `{"name": "f", "arguments": {}}`, alone or in an array."""

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """A name, then the JSON of the arguments: `begin prefix NAME separator {...} end`.

    Instead of a separator an id may follow: `id_begin ID separator`. Without `separators` the JSON
    follows the name at once.
    """

    begin: str = ""
    prefixes: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    id_begin: str = ""
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Calls in tags, with the text of each argument: `begin NAME name_end (key value)* end`.

    An argument is `key_begin KEY key_end value_begin TEXT value_end`. The schema of a tool says
    whether a text is a string or JSON.
    """

    begin: str
    name_end: str
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    end: str
    newlines: bool = True  # a newline at each end of a value belongs to its tags


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Python's syntax: `[f(a=1), g(b="x")]`."""


@dataclass(frozen=True, slots=True)
class CallFrame:
    """How a model is made to write a call: the text before its name and arguments, and after them.

    `separator` stands between two calls. `trigger` is the beginning of `begin` that never begins
    an answer in words. Names are JSON strings if `quoted`.
    """

    begin: str
    middle: str
    end: str
    separator: str
    trigger: str
    quoted: bool = True


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes its tool calls.

    A section of calls begins with one of the tags `begins`, and may end with one of `ends`. With
    `bare`, the output may also begin with a section that has no tag; then only names of the
    request's tools count as calls, because other JSON would look the same. Calls of a section may
    be separated by `separators`.
    """

    json: JsonCalls | None = None
    named: NamedCalls | None = None
    tagged: TaggedCalls | None = None
    python: PythonCalls | None = None
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: bool = False
    separators: tuple[str, ...] = ()
    # The model's chat template takes ids of nine letters and digits only.
    short_ids: bool = False
    # None if calls in this format cannot be enforced.
    frame: CallFrame | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags. Some models have special tokens for them, which must be kept in the text."""
        named = self.named
        inner: tuple[str, ...] = ()
        if named is not None:
            # `function<sep>` has a tag behind a word.
            prefixes = [prefix[prefix.find("<") :] for prefix in named.prefixes if "<" in prefix]
            ends = [end[end.find("<") :] for end in named.ends]
            inner = (named.begin, *prefixes, *named.separators, named.id_begin, *ends)
        return tuple(dict.fromkeys(filter(None, (*self.begins, *self.ends, *inner))))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands at an output's beginning, between a tag of `begins` and one of `ends`."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags; see ToolFormat.tags."""
        return (*self.begins, *self.ends)


def _xml(begin: str, end: str) -> TaggedCalls:
    return TaggedCalls(begin, ">", "<parameter=", ">", "", "</parameter>", end)


_DEEPSEEK = NamedCalls(
    begin="<｜tool▁call▁begin｜>",
    prefixes=("function<｜tool▁sep｜>",),
    separators=("<｜tool▁sep｜>", "\n```json\n"),
    ends=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    # Hermes, Qwen 2.5, Qwen 3 and many that were trained on their data.
    "hermes": ToolFormat(
        json=JsonCalls(),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        frame=CallFrame(
            '<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n", "<tool_call>"
        ),
    ),
    "llama3_json": ToolFormat(
        json=JsonCalls(arguments=("parameters", "arguments")),
        begins=("<|python_tag|>",),
        bare=True,
        separators=(";", ","),
        frame=CallFrame('{"name": ', ', "parameters": ', "}", "; ", "{"),
    ),
    "qwen3_coder": ToolFormat(
        tagged=_xml("<function=", "</function>"),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        bare=True,
    ),
    "mistral": ToolFormat(
        json=JsonCalls(),
        named=NamedCalls(separators=("[ARGS]",), id_begin="[CALL_ID]"),
        begins=("[TOOL_CALLS]",),
        short_ids=True,
    ),
    "pythonic": ToolFormat(
        python=PythonCalls(),
        begins=("<|python_start|>", "<|tool_call_start|>"),
        ends=("<|python_end|>", "<|tool_call_end|>"),
        bare=True,
    ),
    # V3 and R1 write `function<sep>NAME\n```json\n{...}\n```, V3.1 `NAME<sep>{...}`. Both are read.
    "deepseek_v3": ToolFormat(
        named=_DEEPSEEK,
        begins=("<｜tool▁calls▁begin｜>",),
        ends=("<｜tool▁calls▁end｜>",),
        frame=CallFrame(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            "<｜tool▁calls▁begin｜>",
            quoted=False,
        ),
    ),
    "deepseek_v31": ToolFormat(
        named=_DEEPSEEK,
        begins=("<｜tool▁calls▁begin｜>",),
        ends=("<｜tool▁calls▁end｜>",),
        frame=CallFrame(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            "<｜tool▁calls▁begin｜>",
            quoted=False,
        ),
    ),
    # What a model is made to write whose own format cannot be enforced.
    "json": ToolFormat(
        json=JsonCalls(),
        bare=True,
        separators=(",",),
        frame=CallFrame('{"name": ', ', "arguments": ', "}", ", ", "{"),
    ),
    "kimi_k2": ToolFormat(
        named=NamedCalls(
            begin="<|tool_call_begin|>",
            prefixes=("functions.",),
            separators=("<|tool_call_argument_begin|>",),
            id_begin=":",
            ends=("<|tool_call_end|>",),
        ),
        begins=("<|tool_calls_section_begin|>",),
        ends=("<|tool_calls_section_end|>",),
    ),
    "granite": ToolFormat(json=JsonCalls(), begins=("<|tool_call|>", "<tool_call>")),
    "glm45": ToolFormat(
        tagged=TaggedCalls(
            "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", False
        ),
        begins=("<tool_call>",),
    ),
    "seed_oss": ToolFormat(
        tagged=_xml("<function=", "</function>"),
        begins=("<seed:tool_call>",),
        ends=("</seed:tool_call>",),
    ),
}

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    # DeepSeek R1, Qwen 3, GLM and most others.
    "think": ReasoningFormat(("<think>",), ("</think>",)),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
    "kimi": ReasoningFormat(("◁think▷",), ("◁/think▷",)),
    "command_a": ReasoningFormat(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
}
