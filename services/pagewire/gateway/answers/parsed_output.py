"""The events of a job's generations, parsed as their text arrives."""

from collections.abc import Sequence

from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.parsers.events import CallBegin, CallEnd, Event, Reasoning
from pagewire.gateway.parsers.output_format import OutputFormat
from pagewire.gateway.parsers.output_parser import OutputParser

# Parsing this many characters takes about a millisecond.
_PIECE_CHARACTERS = 4096


class ParsedOutput:
    """A parser for each generation. With `output` None, all text is content.

    A parser lives as long as the HTTP request, also when the generation moves to another scheduler.
    """

    def __init__(self, output: OutputFormat | None) -> None:
        self._output = output or OutputFormat()
        self._parsers: dict[int, OutputParser] = {}
        self._has_calls: dict[int, bool] = {}  # with calls: whether the latest one is complete

    @property
    def short_ids(self) -> bool:
        """Whether ids of calls must be short."""
        return self._output.short_ids

    async def take(self, generation: Generation, pacer: Pacer) -> list[Event]:
        """The events since the last call, with the last ones if the generation has finished.

        Text that arrives during the call is left for the next call, unless it has finished.
        """
        finished, text = generation.finish is not None, generation.take_text()
        parser = self._parser(generation.index)
        events: list[Event] = []
        for begin in range(0, len(text), _PIECE_CHARACTERS):
            events += parser.feed(text[begin : begin + _PIECE_CHARACTERS])
            await pacer.pause_if_due()
        if finished:
            events += parser.finish()
        for each in events:
            if isinstance(each, CallBegin | CallEnd):
                self._has_calls[generation.index] = isinstance(each, CallEnd)
        if not self._output.shows_reasoning:
            return [each for each in events if not isinstance(each, Reasoning)]
        return events

    def has_calls(self, generation: Generation) -> bool:
        """Whether there are calls, and the latest one is complete."""
        return self._has_calls.get(generation.index, False)

    def reasoning_tokens(self, generations: Sequence[Generation]) -> int | None:
        """Reasoning tokens of all; None if one has an unknown number, or without reasoning."""
        if not self._output.reasoning:
            return None
        counts = [
            self._output.reasoning_tokens(self._parser(each.index), each.tokens)
            for each in generations
        ]
        return None if None in counts else sum(count or 0 for count in counts)

    def _parser(self, index: int) -> OutputParser:
        if index not in self._parsers:
            self._parsers[index] = self._output.parser()
        return self._parsers[index]
