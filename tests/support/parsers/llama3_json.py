"""Fixtures of Llama 3: {"name": ..., "parameters": ...} at the beginning of an output."""

from support.parsers.notation import ARGUMENTS, Case, Types

TYPES: Types = {"f": {}, "g": {}}


def _call(arguments: str, name: str = "f") -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


F = _call("{}")
_PERSON = '{"name": "Ann", "age": 5}'

CASES: list[Case] = [
    *((_call(each), [("f", each)]) for each in ARGUMENTS),
    # several calls
    (f"{F}; {F}", [("f", "{}"), ("f", "{}")]),
    (f"{F};{F}; {F}", [("f", "{}")] * 3),
    (f"{F}, {_call('{}', 'g')}", [("f", "{}"), ("g", "{}")]),
    (f"[{F}, {F}]", [("f", "{}"), ("f", "{}")]),
    (f"[{F}]", [("f", "{}")]),
    # the form of a call
    (f"\n\n{F}\n", [("f", "{}")]),
    (f"<|python_tag|>{F}", [("f", "{}")]),
    (f"<|python_tag|>\n{F}; {F}", [("f", "{}"), ("f", "{}")]),
    (f"I look.<|python_tag|>{F}", ["I look.", ("f", "{}")]),
    ('<|python_tag|>{"name": "other", "parameters": {}}', [("other", "{}")]),
    ('{"type": "function", "name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    ('{"name": "f", "arguments": {"a": 1}}', [("f", '{"a": 1}')]),
    ('{"parameters": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
    ('{"name":"f","parameters":{"a":1}}', [("f", '{"a":1}')]),
    ('{"name": "f", "parameters": {}, "x": [1]}', [("f", "{}")]),
    (f"{F}\nThat was it.", [("f", "{}"), "That was it."]),
    (f"{F} {F}", [("f", "{}"), F]),
    # cut off
    ('{"name": "f", "parameters": {"a": "b', [["f", '{"a": "b']]),
    ('{"name": "f", "parameters": {"a": {"b": [1', [["f", '{"a": {"b": [1']]),
    ('{"name": "f", "parameters": ', ['{"name": "f", "parameters": ']),
    ('{"name": "f", "par', ['{"name": "f", "par']),
    ('{"name": "', ['{"name": "']),
    ("{", ["{"]),
    (f'{F}; {{"name": "g"', [("f", "{}"), '; {"name": "g"']),
    (f"{F};", [("f", "{}"), ";"]),
    ("<|python_tag|>", ["<|python_tag|>"]),
    ("<|python", ["<|python"]),
    # no call
    ("", []),
    ("Hello", ["Hello"]),
    (" Hello\n", [" Hello\n"]),
    (_PERSON, [_PERSON]),
    (f"[{_PERSON}]", [f"[{_PERSON}]"]),
    (f"{F[:-1]}", [("f", "{}")]),
    ('{"name": "other", "parameters": {}}', ['{"name": "other", "parameters": {}}']),
    ('{"name": "f"}', ['{"name": "f"}']),
    ('{"name": "f", "parameters": null}', ['{"name": "f", "parameters": null}']),
    ('{"name": "f", "parameters": "{}"}', ['{"name": "f", "parameters": "{}"}']),
    ('{"a": 1}', ['{"a": 1}']),
    ("{}", ["{}"]),
    ("[1, 2]", ["[1, 2]"]),
    (f"Call it so: {F}", [f"Call it so: {F}"]),
    (f"```json\n{F}\n```", [f"```json\n{F}\n```"]),
    ("{not json}", ["{not json}"]),
    ("<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ('<|python_tag|>search.call(q="x")', ['<|python_tag|>search.call(q="x")']),
]
