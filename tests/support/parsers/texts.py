"""Texts made of tags and of parts of calls."""

from hypothesis import strategies as st

from pagewire.output_formats import REASONING_FORMATS, TOOL_FORMATS

PARTS = [
    *sorted({tag for spec in TOOL_FORMATS.values() for tag in spec.tags}),
    *sorted({tag for spec in REASONING_FORMATS.values() for tag in spec.tags}),
    *"{}[]()\"\\,:;=\n '<>/-",
    *("name", "arguments", "f", "a", "x", "é", "🙂", "1", "True", "null", "\\u", "\\ud83d", "```"),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": ', "[f(a=1)]", "f(a="),
    *("<function=f>", "<function=", "</function>", "<parameter=a>", "</parameter>", "function"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '"name"', '"arguments"'),
]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=30).map("".join)
_CHANNELS = [
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>assistant"),
    *("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", " to=functions.f"),
    *("<|end|>", "<|call|>", "<|return|>", "<|channel|>", "<|message|>", "<|start|>", "<|"),
    *("a", " ", "\n", "<", '{"a": 1}', "{", "}", '"', " to=f", '{"name": "f", "arguments": {}}'),
]
CHANNEL_TEXTS = st.lists(st.sampled_from(_CHANNELS), max_size=25).map("".join)
