"""The events of a job's generations, parsed as their text arrives."""

from collections.abc import Sequence

from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.parsers.events import CallBegin, Event, Reasoning
from pagewire.gateway.parsers.output_format import OutputFormat
from pagewire.gateway.parsers.output_parser import OutputParser

# Parsing them takes about a millisecond.
_PIECE_CHARACTERS = 4096


class ParsedOutput:
    """A parser for each generation. `output` None parses nothing: all text is content.

    It lives as long as the HTTP request. So a generation that goes on elsewhere continues here.
    """

    def __init__(self, output: OutputFormat | None) -> None:
        self._output = output or OutputFormat()
        self._parsers: dict[int, OutputParser] = {}
        self._calls: dict[int, int] = {}

    @property
    def short_ids(self) -> bool:
        """Whether ids of calls must be short."""
        return self._output.short_ids

    async def take(self, generation: Generation, pacer: Pacer) -> list[Event]:
        """The events since the last call. If it has finished, the last ones are among them.

        Text that arrives meanwhile is left for the next call, as long as it has not finished.
        """
        finished, text = generation.finish is not None, generation.take_text()
        parser = self._parser(generation.index)
        events: list[Event] = []
        for begin in range(0, len(text), _PIECE_CHARACTERS):
            events += parser.feed(text[begin : begin + _PIECE_CHARACTERS])
            await pacer.pause_if_due()
        if finished:
            events += parser.finish()
        self._calls[generation.index] += sum(isinstance(each, CallBegin) for each in events)
        if not self._output.shows_reasoning:
            return [each for each in events if not isinstance(each, Reasoning)]
        return events

    def num_calls(self, generation: Generation) -> int:
        """The calls so far."""
        return self._calls.get(generation.index, 0)

    def reasoning_tokens(self, generations: Sequence[Generation]) -> int | None:
        """Tokens of the reasoning of all; None if that is not known of one, or there is none."""
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
            self._calls[index] = 0
        return self._parsers[index]
