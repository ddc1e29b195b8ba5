"""Parsers of models' outputs, for texts made of parts of calls and reasoning."""

from collections import Counter
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.gateway.parsers.output_parser import OutputParser
from pagewire.output_formats import REASONING_FORMATS, TOOL_FORMATS
from support.parsers.notation import shortened
from support.parsers.texts import TEXTS

Inputs = Callable[[str], int]
Tally = Callable[[str], Counter[str]]

TYPES = {"f": {"a": frozenset({"integer"})}}


def test_outputs_in_every_format(inputs: Inputs, tally: Tally) -> None:
    """No error is raised, splits change nothing, and text without calls and reasoning stays."""
    counts = tally("outputs")

    @settings(max_examples=inputs("outputs"), deadline=None, database=None, derandomize=False)
    @given(
        text=TEXTS,
        tools=st.sampled_from([*TOOL_FORMATS]),
        reasoning=st.sampled_from([None, *REASONING_FORMATS]),
        inside=st.booleans(),
        size=st.integers(1, 9),
    )
    def check(text: str, tools: str, reasoning: str | None, inside: bool, size: int) -> None:
        counts[tools] += 1
        found = []
        for pieces in ([text], [text[at : at + size] for at in range(0, len(text), size)]):
            spec = REASONING_FORMATS[reasoning] if reasoning else None
            parser = OutputParser(spec, inside, TOOL_FORMATS[tools], TYPES)
            events = [event for piece in pieces for event in parser.feed(piece)]
            found.append(shortened(events + parser.finish()))
        assert found[0] == found[1]
        if all(type(item) is str for item in found[0]) and reasoning is None:
            assert "".join(map(str, found[0])) == text

    check()
