"""Fixtures of reasoning, with the name of the format and whether the prompt has opened it."""

from support.parsers.notation import Case, R

_TAGS = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "command_a": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
_CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def _cases(begin: str, end: str) -> list[tuple[bool, Case]]:
    other = end[:-1]  # a tag that is not complete
    return [
        (False, (f"{begin}why{end}so", [R("why"), "so"])),
        (False, (f"{begin}\nwhy\n{end}\n\nso", [R("why"), "so"])),
        (False, (f"\n {begin}why{end} so\n", [R("why"), "so\n"])),
        (False, (f"{begin}a\n\nb  c{end}so", [R("a\n\nb  c"), "so"])),
        (False, (f"{begin}{end}so", ["so"])),
        (False, (f"{begin}\n\n{end}\n\nso", ["so"])),
        (False, (f"{begin}why{end}", [R("why")])),
        (False, (f"{begin}why", [R("why")])),
        (False, (f"{begin}why\n", [R("why\n")])),
        (False, (begin, [])),
        (False, ("so", ["so"])),
        (False, ("\n so", ["\n so"])),
        (False, ("", [])),
        (False, (f"so {begin}why{end}", [f"so {begin}why{end}"])),
        (False, (f"so {end} it is", [f"so {end} it is"])),
        (False, (begin[:-1], [begin[:-1]])),
        (False, (f"{begin}why {other}", [R(f"why {other}")])),
        (False, (f"{begin}why {other} {end}so", [R(f"why {other}"), "so"])),
        (False, (f"{begin}why {begin}{end}so", [R(f"why {begin}"), "so"])),
        (False, (f"{begin}why{end}so {end}", [R("why"), f"so {end}"])),
        (False, (f"{begin}why{end}so {begin}x{end}", [R("why"), f"so {begin}x{end}"])),
        (False, (f"{begin}{_CALL}{end}so", [R(_CALL), "so"])),
        (False, (f"{begin}why{end}\n\n{_CALL}", [R("why"), ("f", "{}")])),
        (False, (f"{begin}why{end}so {_CALL}", [R("why"), "so", ("f", "{}")])),
        (False, (_CALL, [("f", "{}")])),
        (False, (f"\n{_CALL}", [("f", "{}")])),
        (True, (f"why{end}so", [R("why"), "so"])),
        (True, (f"\nwhy\n{end}\n\nso", [R("why"), "so"])),
        (True, (f"{begin}why{end}so", [R("why"), "so"])),
        (True, (f"\n{begin}\nwhy{end}so", [R("why"), "so"])),
        (True, (f"{end}so", ["so"])),
        (True, (f"why{end}{_CALL}", [R("why"), ("f", "{}")])),
        (True, ("why", [R("why")])),
        (True, ("", [])),
        (True, (f"why {other}", [R(f"why {other}")])),
        (True, (f"{_CALL}", [R(_CALL)])),
    ]


CASES = [
    (name, in_reasoning, case)
    for name, tags in _TAGS.items()
    for in_reasoning, case in _cases(*tags)
]
