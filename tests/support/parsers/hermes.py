"""Fixtures of Hermes and Qwen: <tool_call>{json}</tool_call>."""

from support.parsers.notation import ARGUMENTS, Case


def _call(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


F = _call("{}")

CASES: list[Case] = [
    *((_call(each), [("f", each)]) for each in ARGUMENTS),
    # text around calls
    ("", []),
    ("Hello", ["Hello"]),
    ("Hello\n", ["Hello\n"]),
    (" \n", [" \n"]),
    (f"Let me look.\n\n{F}", ["Let me look.", ("f", "{}")]),
    (f"{F}\n\nDone.", [("f", "{}"), "Done."]),
    (f"a {F} b {F} c", ["a", ("f", "{}"), "b", ("f", "{}"), "c"]),
    (f"{F}{F}", [("f", "{}"), ("f", "{}")]),
    (f"{F}\n{F}\n{F}\n", [("f", "{}")] * 3),
    (_call('{"a": 1}', "g") + _call("{}", "h"), [("g", '{"a": 1}'), ("h", "{}")]),
    # the form of a call
    ('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', [("f", '{"a":1}')]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": "\\u007b}"}</tool_call>', [("f", "{}")]),
    (
        '<tool_call>{"id": "1", "x": [1, {"y": 2}], "name": "f", "arguments": {}}</tool_call>',
        [("f", "{}")],
    ),
    ('<tool_call>{"name": "f", "arguments": {}, "id": 7}</tool_call>', [("f", "{}")]),
    ('<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', [("f", "{}")]),
    ('<tool_call>{"name": "a.b-c/d", "arguments": {}}</tool_call>', [("a.b-c/d", "{}")]),
    ('<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}', [("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}',
        [("f", "{}"), ("g", "{}")],
    ),
    ('<tool_call>\t\r\n {"name" : "f" , "arguments" : { } }\t</tool_call>', [("f", "{ }")]),
    # cut off
    ('<tool_call>{"name": "f", "arguments": {"a": "b', [["f", '{"a": "b']]),
    ('<tool_call>{"name": "f", "arguments": {', [["f", "{"]]),
    ('<tool_call>{"name": "f", "arguments": ', ['<tool_call>{"name": "f", "arguments": ']),
    ('<tool_call>{"name": "f', ['<tool_call>{"name": "f']),
    ("<tool_call>", ["<tool_call>"]),
    ("<tool_c", ["<tool_c"]),
    (f"{F}\n<tool_ca", [("f", "{}"), "<tool_ca"]),
    (F.removesuffix("/tool_call>"), [("f", "{}")]),
    (F.removesuffix("ll>"), [("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": "{\\"a',
        ['<tool_call>{"name": "f", "arguments": "{\\"a'],
    ),
    # no call
    ("Use <tool_call> to call.", ["Use <tool_call> to call."]),
    ("Write `<tool_call>{...}</tool_call>`.", ["Write `<tool_call>{...}</tool_call>`."]),
    ("</tool_call>", ["</tool_call>"]),
    ("<tool_call></tool_call>", ["<tool_call></tool_call>"]),
    ("<tool_call>{}</tool_call>", ["<tool_call>{}</tool_call>"]),
    ("<tool_call>[]</tool_call>", ["<tool_call>[]</tool_call>"]),
    ('<tool_call>{"name": 5, "arguments": {}}', ['<tool_call>{"name": 5, "arguments": {}}']),
    ('<tool_call>{"name": "", "arguments": {}}', ['<tool_call>{"name": "", "arguments": {}}']),
    ('<tool_call>{"arguments": {"a": 1}}', ['<tool_call>{"arguments": {"a": 1}}']),
    ("<tool_call>f(1)</tool_call>", ["<tool_call>f(1)</tool_call>"]),
    ("a < b and <tool <tool_calls>", ["a < b and <tool <tool_calls>"]),
    (f"<tool_call>\n{F}", ["<tool_call>", ("f", "{}")]),
    (f"<tool_call>oops {F}", ["<tool_call>oops", ("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": [1]}', ['<tool_call>{"name": "f", "arguments": [1]}']),
    # a call with something wrong behind its arguments
    (
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
        [("f", "{}"), "}</tool_call>"],
    ),
    ('<tool_call>{"name": "f", "arguments": {} oops}', [("f", "{}"), " oops}"]),
]
