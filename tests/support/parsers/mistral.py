"""Fixtures of Mistral: [TOOL_CALLS] with an array of JSON, or with names and JSON."""

from support.parsers.notation import ARGUMENTS, Case

_ARRAY = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
_NAMED = "[TOOL_CALLS]f[ARGS]{}"

CASES: list[Case] = [
    *((f"[TOOL_CALLS]f[ARGS]{each}", [("f", each)]) for each in ARGUMENTS),
    *(
        (f'[TOOL_CALLS] [{{"name": "f", "arguments": {each}}}]', [("f", each)])
        for each in ARGUMENTS
    ),
    # several calls
    (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (f"{_NAMED}[TOOL_CALLS]g[ARGS]{{}}", [("f", "{}"), ("g", "{}")]),
    (f"{_NAMED}\n{_NAMED} {_NAMED}", [("f", "{}")] * 3),
    (f"{_ARRAY}{_NAMED}", [("f", "{}"), ("f", "{}")]),
    # the form of a call
    ('[TOOL_CALLS]f{"a": 1}', [("f", '{"a": 1}')]),
    ('[TOOL_CALLS]f {"a": 1}', [("f", '{"a": 1}')]),
    ('[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
    ("[TOOL_CALLS] a-b.c[ARGS] {}", [("a-b.c", "{}")]),
    ('[TOOL_CALLS]{"name": "f", "arguments": {}}', [("f", "{}")]),
    ('[TOOL_CALLS][{"name":"f","arguments":{},"id":"a1B2c3D4e"}]', [("f", "{}")]),
    ('[TOOL_CALLS][{"name":"f","arguments":"{\\"a\\":1}"}]', [("f", '{"a":1}')]),
    (f"I look.{_NAMED}", ["I look.", ("f", "{}")]),
    (f"{_NAMED}\n\nDone.", [("f", "{}"), "Done."]),
    (f"{_ARRAY} Done.", [("f", "{}"), "Done."]),
    # cut off
    ('[TOOL_CALLS]f[ARGS]{"a": "b', [["f", '{"a": "b']]),
    ("[TOOL_CALLS]f[ARGS]", ["[TOOL_CALLS]f[ARGS]"]),
    ("[TOOL_CALLS]f", ["[TOOL_CALLS]f"]),
    ("[TOOL_CALLS]", ["[TOOL_CALLS]"]),
    ("[TOOL_CA", ["[TOOL_CA"]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {"a', [["f", '{"a']]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}', [("f", "{}")]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"na', [("f", "{}"), ', {"na']),
    # no call
    ("", []),
    ("Hello [1]", ["Hello [1]"]),
    ("Use [TOOL_CALLS] here.", ["Use [TOOL_CALLS] here."]),
    ("[TOOL_CALLS] [1, 2]", ["[TOOL_CALLS] [1, 2]"]),
    ("[TOOL_CALLS]f[ARGS]1", ["[TOOL_CALLS]f[ARGS]1"]),
    ("[TOOL_CALLS][ARGS]{}", ["[TOOL_CALLS][ARGS]{}"]),
    ("[TOOL_CALLS]f(1)", ["[TOOL_CALLS]f(1)"]),
    (f"[TOOL_CALLS]{_NAMED}", [f"[TOOL_CALLS]{_NAMED}"]),
    ("a[b] [TOOL", ["a[b] [TOOL"]),
    ("[ARGS]{}", ["[ARGS]{}"]),
]
