"""Fixtures of Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>text</parameter></function>."""

from support.parsers.notation import Case, Types

TYPES: Types = {
    "f": {
        "s": frozenset({"string"}),
        "i": frozenset({"integer"}),
        "n": frozenset({"number"}),
        "b": frozenset({"boolean"}),
        "l": frozenset({"array"}),
        "o": frozenset({"object"}),
        "u": frozenset({"string", "null"}),
        "x": frozenset(),
    },
    "g": {},
}


def _call(*arguments: tuple[str, str], name: str = "f") -> str:
    inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


F = _call()
_BARE = "<function=f>\n<parameter=i>\n1\n</parameter>\n</function>"

# Key, text, and the JSON that follows from the type of the key.
_VALUES = [
    ("s", "hello", '"hello"'),
    ("s", "", '""'),
    ("s", "5", '"5"'),
    ("s", "null", '"null"'),
    ("s", '{"a": 1}', '"{\\"a\\": 1}"'),
    ("s", "a\nb", '"a\\nb"'),
    ("s", "\na\n", '"\\na\\n"'),
    ("s", 'say "x" \\ y', '"say \\"x\\" \\\\ y"'),
    ("s", "if a < b and c > d:", '"if a < b and c > d:"'),
    ("s", "<b>x</b> </param <parameter=y>", '"<b>x</b> </param <parameter=y>"'),
    ("s", "</function>\n</tool_call>", '"</function>\\n</tool_call>"'),
    ("s", "héllo 🙂\t", '"héllo 🙂\\t"'),
    ("s", "  spaces  ", '"  spaces  "'),
    ("i", "5", "5"),
    ("i", "-5", "-5"),
    ("i", " 5 ", "5"),
    ("i", "5.0", "5.0"),
    ("i", "five", '"five"'),
    ("i", "null", "null"),
    ("n", "1.5e3", "1.5e3"),
    ("n", "3", "3"),
    ("n", "NaN", '"NaN"'),
    ("b", "true", "true"),
    ("b", "False", "false"),
    ("b", "yes", '"yes"'),
    ("l", "[1, 2]", "[1, 2]"),
    ("l", "[", '"["'),
    ("l", "{}", '"{}"'),
    ("o", '{"a": {"b": "</x>"}}', '{"a": {"b": "</x>"}}'),
    ("o", "{a: 1}", '"{a: 1}"'),
    ("o", "None", "null"),
    ("u", "x", '"x"'),
    ("u", "null", "null"),
    ("u", "7", '"7"'),
    ("x", "7", "7"),
    ("x", "abc", '"abc"'),
    ("x", "[1]", "[1]"),
    ("undeclared", "7", '"7"'),
]

CASES: list[Case] = [
    *((_call((key, text)), [("f", f'{{"{key}": {json}}}')]) for key, text, json in _VALUES),
    (F, [("f", "{}")]),
    (_call(("s", "a"), ("i", "1")), [("f", '{"s": "a", "i": 1}')]),
    (_call(("i", "1"), ("s", "a"), ("b", "true")), [("f", '{"i": 1, "s": "a", "b": true}')]),
    (_call(("a", "1"), name="other"), [("other", '{"a": "1"}')]),
    (f"{F}\n{F}", [("f", "{}"), ("f", "{}")]),
    (f"I look.\n\n{F}", ["I look.", ("f", "{}")]),
    (f"{F}\nDone.", [("f", "{}"), "Done."]),
    ("<tool_call><function=f></function></tool_call>", [("f", "{}")]),
    (
        "<tool_call><function=f><parameter=s>a</parameter></function></tool_call>",
        [("f", '{"s": "a"}')],
    ),
    ("<tool_call>\n<function=f>\n</function>", [("f", "{}")]),
    (
        "<tool_call>\n<function=f>\n</function>\n<function=g>\n</function>\n</tool_call>",
        [("f", "{}"), ("g", "{}")],
    ),
    (_BARE, [("f", '{"i": 1}')]),
    (f"I look.\n{_BARE}\n</tool_call>", ["I look.", ("f", '{"i": 1}')]),
    # cut off
    ("<tool_call>\n<function=f>\n<parameter=s>\nab", [["f", '{"s": "ab']]),
    ("<tool_call>\n<function=f>\n<parameter=s>\nab\n</param", [["f", '{"s": "ab\\n</param']]),
    ("<tool_call>\n<function=f>\n<parameter=i>\n12", [["f", '{"i": ']]),
    ("<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n", [["f", '{"s": "a"']]),
    *(
        (f"<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n{cut}", [["f", '{"s": "a"']])
        for cut in ("<", "</func", "</function", "<param", "<parameter")
    ),
    (F.removesuffix("call>"), [("f", "{}")]),
    ("<tool_call>\n<function=f>\n", ["<tool_call>\n<function=f>\n"]),
    ("<tool_call>\n<function=f", ["<tool_call>\n<function=f"]),
    ("<tool_call>\n", ["<tool_call>\n"]),
    # no call
    ("", []),
    ("Hello <b>", ["Hello <b>"]),
    ("<tool_call>\noops</tool_call>", ["<tool_call>\noops</tool_call>"]),
    ('<tool_call>\n{"name": "f"}\n</tool_call>', ['<tool_call>\n{"name": "f"}\n</tool_call>']),
    ("<function=other>\n</function>", ["<function=other>\n</function>"]),
    ("Use <function=NAME> here", ["Use <function=NAME> here"]),
    ("<tool_call><function=></function>", ["<tool_call><function=></function>"]),
    ("<tool_call><function=f>\ntext", ["<tool_call><function=f>\ntext"]),
    (f"<tool_call> {F}", ["<tool_call>", ("f", "{}")]),
]
