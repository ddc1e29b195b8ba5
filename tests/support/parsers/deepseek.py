"""Fixtures of DeepSeek: V3 and R1 with a fence of JSON, V3.1 without."""

from support.parsers.notation import ARGUMENTS, Case

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def v3(arguments: str, name: str = "f") -> str:
    return f"{_CALL}function{_SEP}{name}\n```json\n{arguments}\n```{_CALL_END}"


def v31(arguments: str, name: str = "f") -> str:
    return f"{_CALL}{name}{_SEP}{arguments}{_CALL_END}"


F3, F31 = f"{_BEGIN}{v3('{}')}{_END}", f"{_BEGIN}{v31('{}')}{_END}"

CASES: list[Case] = [
    *((f"{_BEGIN}{v3(each)}{_END}", [("f", each)]) for each in ARGUMENTS),
    *((f"{_BEGIN}{v31(each)}{_END}", [("f", each)]) for each in ARGUMENTS),
    # several calls
    (f"{_BEGIN}{v3('{}')}\n{v3('{}', 'g')}{_END}", [("f", "{}"), ("g", "{}")]),
    (f"{_BEGIN}{v31('{}')}{v31('{}', 'g')}{_END}", [("f", "{}"), ("g", "{}")]),
    (f"{F31}\n{F3}", [("f", "{}"), ("f", "{}")]),
    # the form of a call
    (f"I look.\n\n{F3}", ["I look.", ("f", "{}")]),
    (f"{F31}Done.", [("f", "{}"), "Done."]),
    (f"{_BEGIN}\n{v31('{}')}\n{_END}\n", [("f", "{}")]),
    (f"{_BEGIN}{v31('{}', 'a.b-c')}", [("a.b-c", "{}")]),
    (f"{_BEGIN}{_CALL}f{_SEP} {{}}{_END}", [("f", "{}")]),
    (f"{_BEGIN}{_CALL}function{_SEP}f\n```json\n{{}}{_END}", [("f", "{}")]),
    # cut off
    (f"{_BEGIN}{_CALL}function{_SEP}f\n```json\n{{}}\n```", [("f", "{}")]),
    (f'{_BEGIN}{_CALL}f{_SEP}{{"a": "b', [["f", '{"a": "b']]),
    (f'{_BEGIN}{_CALL}function{_SEP}f\n```json\n{{"a": 1', [["f", '{"a": 1']]),
    (f"{_BEGIN}{_CALL}f{_SEP}", [f"{_BEGIN}{_CALL}f{_SEP}"]),
    (f"{_BEGIN}{_CALL}f", [f"{_BEGIN}{_CALL}f"]),
    (f"{_BEGIN}{_CALL}", [f"{_BEGIN}{_CALL}"]),
    (_BEGIN, [_BEGIN]),
    ("<｜tool▁calls", ["<｜tool▁calls"]),
    (f"{_BEGIN}{v31('{}')}<｜tool▁c", [("f", "{}"), "<｜tool▁c"]),
    # no call
    ("", []),
    ("Hello <b>", ["Hello <b>"]),
    (f"{_BEGIN}{_END}", [f"{_BEGIN}{_END}"]),
    (f"{_BEGIN}text", [f"{_BEGIN}text"]),
    (f"{_BEGIN}{_CALL}f{_SEP}5", [f"{_BEGIN}{_CALL}f{_SEP}5"]),
    (f"{_CALL}f{_SEP}{{}}", [f"{_CALL}f{_SEP}{{}}"]),
    (f"{_BEGIN}{F31}", [_BEGIN, ("f", "{}")]),
]
