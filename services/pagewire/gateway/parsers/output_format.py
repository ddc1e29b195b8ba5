"""How to read the text of an answer: names of formats, and the request's options for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagewire.gateway.parsers.output_parser import OutputParser
from pagewire.output_formats import REASONING_FORMATS, TOOL_FORMATS


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The input of an OutputParser. Without a format's name, the output has no such part.

    `in_reasoning`: the prompt ends within the reasoning. `types` has the tools of the request, each
    with the JSON types of its arguments. Calls beyond `max_calls` are left out.
    `reasoning_end_token` ends the reasoning, if that is one token.
    """

    reasoning: str = ""
    in_reasoning: bool = False
    shows_reasoning: bool = True
    reasoning_end_token: int | None = None
    tools: str = ""
    types: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    max_calls: int | None = None

    def parser(self) -> OutputParser:
        """A parser for one output."""
        return OutputParser(
            REASONING_FORMATS[self.reasoning] if self.reasoning else None,
            self.in_reasoning,
            TOOL_FORMATS[self.tools] if self.tools else None,
            self.types,
            self.max_calls,
        )

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that must stay in the text, for models that have special tokens for them."""
        reasoning = REASONING_FORMATS[self.reasoning].tags if self.reasoning else ()
        return (*reasoning, *(TOOL_FORMATS[self.tools].tags if self.tools else ()))

    @property
    def short_ids(self) -> bool:
        """Whether ids of calls must be short; see ToolFormat."""
        return bool(self.tools) and TOOL_FORMATS[self.tools].short_ids

    def reasoning_tokens(self, parser: OutputParser, tokens: Sequence[int]) -> int | None:
        """The number of reasoning tokens of an output, with the tags; None if it is not known.

        `parser` has read the text of `tokens`.
        """
        if parser.reasoning_state == "none":
            return 0
        if parser.reasoning_state == "open":
            return len(tokens)
        end = self.reasoning_end_token
        places = [i for i, token in enumerate(tokens) if token == end][: parser.reasoning_ends]
        return places[-1] + 1 if len(places) == parser.reasoning_ends > 0 else None
