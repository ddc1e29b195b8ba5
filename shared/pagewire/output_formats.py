"""The formats in which models write tool calls and reasoning, as data.

Schedulers find the format of their model; gateways parse outputs with it.
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
    """The form of calls that a grammar enforces: `begin CALL separator CALL ... close`.

    A call is `before NAME middle ARGUMENTS after`. Names are JSON strings if `quoted`. Arguments
    have the form of the format's `tagged` or `python`, or JSON without both.
    """

    before: str
    middle: str
    after: str
    separator: str = ""
    begin: str = ""
    close: str = ""
    quoted: bool = True


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes its tool calls.

    A section of calls begins with one of the tags `begins`, and may end with one of `ends`. With
    `bare`, the output may also begin with a section that has no tag. Then only names of the
    request's tools count as calls, because other JSON looks the same. `separators` may stand
    between the calls of a section.
    """

    json: JsonCalls | None = None
    named: NamedCalls | None = None
    tagged: TaggedCalls | None = None
    python: PythonCalls | None = None
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: bool = False
    separators: tuple[str, ...] = ()
    # The model's chat template accepts only ids of nine letters and digits.
    short_ids: bool = False
    # The frames in which calls may be enforced; the model chooses the frame of its training. All
    # begin with `trigger`: a tag, or a character with which no answer in words begins.
    frames: tuple[CallFrame, ...] = ()
    trigger: str = ""
    # Calls are messages in channels; the reasoning format of the same name reads them.
    channels: bool = False
    special: tuple[str, ...] = ()  # further special tokens of the format

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags. Some models have special tokens for them, which must stay in the text."""
        named = self.named
        inner: tuple[str, ...] = ()
        if named is not None:
            # `function<sep>` has a tag after a word.
            prefixes = [prefix[prefix.find("<") :] for prefix in named.prefixes if "<" in prefix]
            ends = [end[end.find("<") :] for end in named.ends]
            inner = (named.begin, *prefixes, *named.separators, named.id_begin, *ends)
        return tuple(dict.fromkeys(filter(None, (*self.begins, *self.ends, *inner, *self.special))))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands at an output's beginning, between a tag of `begins` and one of `ends`.

    With `channels`, an output consists of messages in channels; one channel has the reasoning
    (`gateway.parsers.channels`). `answer` begins the answer, unless the reasoning's end does.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    channels: bool = False
    answer: str = ""
    special: tuple[str, ...] = ()  # further special tokens of the format

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags; see ToolFormat.tags."""
        return (*self.begins, *self.ends, *self.special)


def _xml(begin: str, end: str) -> TaggedCalls:
    return TaggedCalls(begin, ">", "<parameter=", ">", "", "</parameter>", end)


def _xml_frame(begin: str, end: str) -> CallFrame:
    before, after = f"{begin}\n<function=", f"</function>\n{end}"
    return CallFrame(before, ">\n", after, "\n", quoted=False)


def _mistral_array(space: str) -> CallFrame:
    begin = f"[TOOL_CALLS]{space}["
    return CallFrame('{"name": ', ', "arguments": ', "}", ", ", begin, "]")


_DEEPSEEK = NamedCalls(
    begin="<｜tool▁call▁begin｜>",
    prefixes=("function<｜tool▁sep｜>",),
    separators=("<｜tool▁sep｜>", "\n```json\n"),
    ends=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
)

_HARMONY = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    # gpt-oss, for calls without reasoning. With reasoning, the channels' parser reads both.
    "harmony": ToolFormat(
        named=NamedCalls(
            separators=tuple(
                f"{channel}{kind}<|message|>"
                for channel in ("", "<|channel|>commentary", "<|channel|>analysis")
                for kind in ("", " <|constrain|>json", "<|constrain|>json", " json")
            )
        ),
        begins=(
            "<|channel|>commentary to=functions.",
            "<|channel|>analysis to=functions.",
            "<|start|>assistant<|channel|>commentary to=functions.",
            "<|start|>assistant<|channel|>analysis to=functions.",
            "<|start|>assistant to=functions.",
            " to=functions.",
        ),
        ends=("<|call|>",),
        channels=True,
        special=_HARMONY,
    ),
    # Hermes, Qwen 2.5, Qwen 3 and many models that were trained on their data.
    "hermes": ToolFormat(
        json=JsonCalls(),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        frames=(CallFrame('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n"),),
        trigger="<tool_call>",
    ),
    "llama3_json": ToolFormat(
        json=JsonCalls(arguments=("parameters", "arguments")),
        begins=("<|python_tag|>",),
        bare=True,
        separators=(";", ","),
        frames=(CallFrame('{"name": ', ', "parameters": ', "}", "; "),),
        trigger="{",
    ),
    "qwen3_coder": ToolFormat(
        tagged=_xml("<function=", "</function>"),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        bare=True,
        frames=(_xml_frame("<tool_call>", "</tool_call>"),),
        trigger="<tool_call>",
    ),
    "mistral": ToolFormat(
        json=JsonCalls(),
        named=NamedCalls(separators=("[ARGS]",), id_begin="[CALL_ID]"),
        begins=("[TOOL_CALLS]",),
        short_ids=True,
        # Newer models write a name, older models an array.
        frames=(
            CallFrame("[TOOL_CALLS]", "[ARGS]", "", quoted=False),
            *(_mistral_array(space) for space in (" ", "")),
        ),
        trigger="[TOOL_CALLS]",
    ),
    "pythonic": ToolFormat(
        python=PythonCalls(),
        begins=("<|python_start|>", "<|tool_call_start|>"),
        ends=("<|python_end|>", "<|tool_call_end|>"),
        bare=True,
        frames=(CallFrame("", "(", ")", ", ", "[", "]", quoted=False),),
        trigger="[",
    ),
    # V3 and R1 write `function<sep>NAME\n```json\n{...}\n```, V3.1 `NAME<sep>{...}`. Both are read.
    "deepseek_v3": ToolFormat(
        named=_DEEPSEEK,
        begins=("<｜tool▁calls▁begin｜>",),
        ends=("<｜tool▁calls▁end｜>",),
        frames=(
            CallFrame(
                before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                middle="\n```json\n",
                after="\n```<｜tool▁call▁end｜>",
                separator="\n",
                begin="<｜tool▁calls▁begin｜>",
                close="<｜tool▁calls▁end｜>",
                quoted=False,
            ),
        ),
        trigger="<｜tool▁calls▁begin｜>",
    ),
    "deepseek_v31": ToolFormat(
        named=_DEEPSEEK,
        begins=("<｜tool▁calls▁begin｜>",),
        ends=("<｜tool▁calls▁end｜>",),
        frames=(
            CallFrame(
                before="<｜tool▁call▁begin｜>",
                middle="<｜tool▁sep｜>",
                after="<｜tool▁call▁end｜>",
                begin="<｜tool▁calls▁begin｜>",
                close="<｜tool▁calls▁end｜>",
                quoted=False,
            ),
        ),
        trigger="<｜tool▁calls▁begin｜>",
    ),
    # The enforced format for a model whose own format cannot be enforced.
    "json": ToolFormat(
        json=JsonCalls(),
        bare=True,
        separators=(",",),
        frames=(CallFrame('{"name": ', ', "arguments": ', "}", ", "),),
        trigger="{",
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
    "granite": ToolFormat(
        json=JsonCalls(),
        begins=("<|tool_call|>", "<tool_call>"),
        frames=(CallFrame('{"name": ', ', "arguments": ', "}", ", ", "<|tool_call|>[", "]"),),
        trigger="<|tool_call|>",
    ),
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
        frames=(_xml_frame("<seed:tool_call>", "</seed:tool_call>"),),
        trigger="<seed:tool_call>",
    ),
}

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "harmony": ReasoningFormat(
        begins=("<|channel|>analysis<|message|>",),
        ends=("<|end|>",),
        channels=True,
        answer="<|channel|>final<|message|>",
        special=_HARMONY,
    ),
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
