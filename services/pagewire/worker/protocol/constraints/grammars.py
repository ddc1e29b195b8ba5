"""Compiled grammars of a model, and the matchers made from them."""

import logging
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from pagewire.grammar_limits import parser_limits
from pagewire.models import eos_token_ids
from pagewire.tokenizer_conversion import tokenizer_file

log = logging.getLogger(__name__)

# Compiled grammars that are kept. One takes some 100 KB.
MAX_COMPILED = 256


class GrammarError(Exception):
    """A grammar that does not compile, or output that it does not allow."""


class Grammars:
    """Compiles each grammar once. Threads may share it."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        """`tokenizer` is that of the model, padded to its vocabulary."""
        self.tokenizer = tokenizer
        self.words = -(-tokenizer.vocab_size // 32)  # of 32 bits, in a mask
        self._lock = Lock()
        # By grammar, the latest used last. Copies share what the lexer has learned.
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of a grammar; GrammarError if it does not compile."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            mine = compiled is None
            if compiled is None:
                compiled = self._compiled[grammar] = Future()
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
        if mine:
            # Without the lock: compiling may take long, and others wait for the future.
            try:
                compiled.set_result(compile_grammar(self.tokenizer, grammar))
            except BaseException as error:
                compiled.set_exception(error)
        return compiled.result().deep_copy()


def grammars_of(model: Path, vocab_size: int, tokenizer: Path | None = None) -> Grammars | None:
    """The grammars of a model; None if its tokenizer cannot be used.

    `tokenizer` is the tokenizer's folder, if that is not the model's. It holds the interpreter's
    lock for about a second with 150,000 tokens, so call it before the worker serves.
    """
    eos = list(eos_token_ids(model))
    try:
        path = str(tokenizer_file(tokenizer or model))
        return Grammars(LLTokenizer(path, n_vocab=vocab_size, eos_token=eos or None))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        log.warning("no structured output: %s", error)
        return None


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a grammar; GrammarError if it does not compile."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    return matcher


def first_line(error: str) -> str:
    """The part of a message of llguidance that is for users."""
    return error.partition("\n<non-verbose/>")[0].strip()
