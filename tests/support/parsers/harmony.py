"""Fixtures of harmony, which gpt-oss writes: calls alone, and whole outputs with their channels."""

from support.parsers.notation import ARGUMENTS, Case, R

_START, _END, _CALL = "<|start|>assistant", "<|end|>", "<|call|>"
_JSON = " <|constrain|>json<|message|>"
_ANALYSIS, _FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_COMMENTARY = "<|channel|>commentary<|message|>"


def call(arguments: str, name: str = "f") -> str:
    """A call as the model writes it."""
    return f"<|channel|>commentary to=functions.{name}{_JSON}{arguments}{_CALL}"


def template_call(arguments: str, name: str = "f") -> str:
    """A call as the chat template renders it; the model sometimes writes this form too."""
    return f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}{_CALL}"


F = call("{}")

# Without reasoning: all text but calls stays as it is.
CASES: list[Case] = [
    *((call(each), [("f", each)]) for each in ARGUMENTS),
    *((template_call(each), [("f", each)]) for each in ARGUMENTS[:12]),
    (f"{_START}{F}", [("f", "{}")]),
    (f"{_START}{template_call('{}')}", [("f", "{}")]),
    (f"<|channel|>analysis to=functions.f{_JSON}{{}}{_CALL}", [("f", "{}")]),
    (f"{F}{_START}{call('{}', 'a.b-c')}", [("f", "{}"), ("a.b-c", "{}")]),
    (f"{_ANALYSIS}why{_END}{_START}{F}", [f"{_ANALYSIS}why{_END}", ("f", "{}")]),
    (f"{_FINAL}so", [f"{_FINAL}so"]),
    ("", []),
    ("so", ["so"]),
    ("so <|", ["so <|"]),
    (F.removesuffix(_CALL), [("f", "{}")]),
    (f'{F.removesuffix("{}" + _CALL)}{{"a": "b', [["f", '{"a": "b']]),
    (
        f"<|channel|>commentary to=functions.f{_JSON}",
        [f"<|channel|>commentary to=functions.f{_JSON}"],
    ),
    ("<|channel|>commentary to=functions.f", ["<|channel|>commentary to=functions.f"]),
    (
        f"<|channel|>commentary to=functions.f{_JSON}5",
        [f"<|channel|>commentary to=functions.f{_JSON}5"],
    ),
    (
        f"<|channel|>commentary to=browser.open{_JSON}{{}}",
        [f"<|channel|>commentary to=browser.open{_JSON}{{}}"],
    ),
]

# With channels, and a tool `f`.
CHANNELS: list[Case] = [
    (f"{_ANALYSIS}why{_END}{_START}{_FINAL}so<|return|>", [R("why"), "so"]),
    (f"{_ANALYSIS}why{_END}{_START}{_FINAL}so", [R("why"), "so"]),
    (f"{_ANALYSIS}why{_END}", [R("why")]),
    (f"{_ANALYSIS}why", [R("why")]),
    (f"{_ANALYSIS}why <|en", [R("why <|en")]),
    (f"{_ANALYSIS}a < b\n\nc{_END}{_START}{_FINAL} a <b> c\n", [R("a < b\n\nc"), " a <b> c\n"]),
    (f"{_ANALYSIS}{_END}{_START}{_FINAL}so", ["so"]),
    (f"{_ANALYSIS}why\n{_END}\n{_START}{_FINAL}so \n<|return|>", [R("why"), "so"]),
    (f"{_FINAL}so", ["so"]),
    (_FINAL, []),
    ("<|channel|>fin", []),
    ("<|channel|>", []),
    ("<|chan", ["<|chan"]),
    ("", []),
    ("so", ["so"]),
    (" to be", [" to be"]),
    (" \nso", [" \nso"]),
    ("<|message|>so", ["<|message|>so"]),
    (f"{_START}<|message|>so", ["so"]),
    (f"<|channel|>a{_END}so", [f"<|channel|>a{_END}so"]),
    ("<|channel|>" + "<" * 1100 + "<|message|>y", ["<|channel|>" + "<" * 1100 + "<|message|>y"]),
    ("<|channel|>" + "x" * 1100, ["<|channel|>" + "x" * 1100]),
    ("<|channel|>" + "x" * 1100 + "<|message|>y", ["<|channel|>" + "x" * 1100 + "<|message|>y"]),
    # several messages of a kind
    (f"{_ANALYSIS}a{_END}{_START}{_ANALYSIS}b{_END}{_START}{_FINAL}c", [R("a\n\nb"), "c"]),
    (f"{_COMMENTARY}a{_END}{_START}{_FINAL}b", ["a\n\nb"]),
    (
        f"{_ANALYSIS}a{_END}{_START}{_COMMENTARY}b{_END}{_START}{_ANALYSIS}c",
        [R("a"), "b", R("\n\nc")],
    ),
    # headers without an end before them
    (f"{_ANALYSIS}why{_START}{_FINAL}so", [R("why"), "so"]),
    (f"{_ANALYSIS}why{_FINAL}so", [R("why"), "so"]),
    ("<|channel|>final <|constrain|>json<|message|>{}", ["{}"]),
    (f"{_START}<|channel|>later<|message|>so", ["so"]),
    # calls
    *((f"{_ANALYSIS}why{_END}{_START}{call(each)}", [R("why"), ("f", each)]) for each in ARGUMENTS),
    (F, [("f", "{}")]),
    (template_call("{}"), [("f", "{}")]),
    (f"{_ANALYSIS}why{_END}{_START}{template_call('{}')}", [R("why"), ("f", "{}")]),
    (f"{_COMMENTARY}I look.{_END}{_START}{F}", ["I look.", ("f", "{}")]),
    (f"{F}{_START}{call('{}', 'g')}", [("f", "{}"), ("g", "{}")]),
    (f"{F}{_START}{_FINAL}so", [("f", "{}"), "so"]),
    (f"<|channel|>analysis to=functions.f<|message|>{{}}{_CALL}", [("f", "{}")]),
    (f"<|channel|>commentary to=f{_JSON}{{}}{_CALL}", [("f", "{}")]),
    (f"<|channel|>commentary to=functions.f{_JSON}{_CALL}", [("f", "{}")]),
    (f"<|channel|>commentary to=functions.f{_JSON} {{ }} {_CALL}", [("f", "{ }")]),
    (f"<|channel|>commentary to=functions.f{_JSON}{{}}", [("f", "{}")]),
    (f'<|channel|>commentary to=functions.f{_JSON}{{"a', [["f", '{"a']]),
    (f"<|channel|>commentary to=functions.f{_JSON}", []),
    (f"<|channel|>commentary to=functions.f{_JSON}now{_CALL}", ["now"]),
    (f"<|channel|>commentary to=functions.f{_JSON}{{}} so{_CALL}", [("f", "{}"), " so"]),
    # tools of OpenAI's own, which no request has
    (f"<|channel|>analysis to=python code<|message|>1 + 1{_CALL}", [R("1 + 1")]),
    (f"<|channel|>commentary to=browser.open code<|message|>{{}}{_CALL}", ["{}"]),
]

# Without tools in the request.
NO_TOOLS: list[Case] = [
    (f"{_ANALYSIS}why{_END}{_START}{F}", [R("why"), "{}"]),
    (f"{_ANALYSIS}why{_END}{_START}{_FINAL}so", [R("why"), "so"]),
]
# With calls that are forced as JSON.
FORCED: list[Case] = [
    (
        f'{_ANALYSIS}why{_END}{_START}{_FINAL}{{"name": "f", "arguments": {{}}}}',
        [R("why"), ("f", "{}")],
    ),
    (f'{_FINAL}{{"name": "f", "arguments": {{"a": 1}}}}<|return|>', [("f", '{"a": 1}')]),
    (f'{_FINAL}{{"name": "f", "arguments": {{"a', [["f", '{"a']]),
    (f"{_FINAL}so", ["so"]),
    (f"{_FINAL}{{so", ["{so"]),
    (F, [("f", "{}")]),
]
