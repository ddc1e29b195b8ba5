"""The limits of grammars, which the scheduler checks and the worker runs with.

Both must agree: a grammar that the scheduler takes must compile in the worker.
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
