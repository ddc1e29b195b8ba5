"""The limits of grammars. The scheduler checks with them, and the worker runs with them.

Both must agree: a grammar that the scheduler accepts must compile in the worker.
"""

from llguidance import LLParserLimits


def parser_limits() -> LLParserLimits:
    """Limits that bound the time of a mask to some milliseconds; messages quote no client input."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
