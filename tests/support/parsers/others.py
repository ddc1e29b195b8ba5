"""Fixtures of formats that share their grammar with others: Kimi K2, GLM 4.5, Granite, Seed."""

from support.parsers.notation import ARGUMENTS, Case, Types

KIMI: list[Case] = [
    *(
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
            f"<|tool_call_argument_begin|>{each}<|tool_call_end|><|tool_calls_section_end|>",
            [("f", each)],
        )
        for each in ARGUMENTS
    ),
    (
        "I look.<|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        ["I look.", ("f", "{}"), ("g", "{}")],
    ),
    ("<|tool_call_begin|>functions", ["<|tool_call_begin|>functions"]),
]
GLM_TYPES: Types = {"f": {"i": frozenset({"integer"}), "s": frozenset({"string"})}}
GLM: list[Case] = [
    ("<tool_call>f\n</tool_call>", [("f", "{}")]),
    (
        "<tool_call>f\n<arg_key>i</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>s</arg_key>\n<arg_value>\na\n</arg_value>\n</tool_call>",
        [("f", '{"i": 1, "s": "\\na\\n"}')],
    ),
    ("<tool_call>f</tool_call>\n<tool_call>f</tool_call>", [("f", "{}"), ("f", "{}")]),
    ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>ab", [["f", '{"s": "ab']]),
    ("<tool_call>f\n<arg_key>s", [["f", ""]]),
    ("<tool_call>f\n<arg_key>s</arg", [["f", ""]]),
    ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_va", [["f", ""]]),
    ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>ab</arg_value>\n<ar", [["f", '{"s": "ab"']]),
    ("Use <tool_call> here", ["Use <tool_call> here"]),
]
GRANITE: list[Case] = [
    *(
        (f'<|tool_call|>[{{"name": "f", "arguments": {each}}}]', [("f", each)])
        for each in ARGUMENTS
    ),
    ("Hello <|tool", ["Hello <|tool"]),
]
SEED: list[Case] = [
    (
        "<seed:tool_call>\n<function=f>\n<parameter=s>a</parameter>\n</function>\n"
        "</seed:tool_call>",
        [("f", '{"s": "a"}')],
    ),
    (
        "<seed:tool_call>\n<function=f>\n<parameter=s>a</parameter>\n</functi",
        [["f", '{"s": "a"']],
    ),
    ("<seed:tool_call>", ["<seed:tool_call>"]),
]
FORCED_TYPES: Types = {"f": {}}
FORCED: list[Case] = [
    *((f'{{"name": "f", "arguments": {each}}}', [("f", each)]) for each in ARGUMENTS),
    (
        '{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}',
        [("f", "{}"), ("f", "{}")],
    ),
    ('{"name": "f", "arguments": {"a"', [["f", '{"a"']]),
    ("Hello", ["Hello"]),
]
