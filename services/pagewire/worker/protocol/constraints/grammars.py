"""Compiled grammars of a model, and the matchers made from them."""

import logging
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from pagewire.grammars.limits import parser_limits
from pagewire.models import eos_token_ids
from pagewire.tokenizer_conversion import tokenizer_file
from pagewire.worker.protocol.constraints.plain_strings import probe_of
from pagewire.worker.protocol.constraints.string_tokens import StringTokens
from pagewire.worker.protocol.constraints.token_matcher import StringMatcher, TokenMatcher

log = logging.getLogger(__name__)

# Compiled grammars that are kept. One takes some 100 KB, or twice that with a second matcher.
MAX_COMPILED = 256


class GrammarError(Exception):
    """A grammar that does not compile, or output that it does not allow.

    `field` is the request's field at fault; empty if the request is not at fault.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Grammars:
    """Compiles grammars and keeps them. Threads may share it."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        """`tokenizer` is that of the model, padded to its vocabulary."""
        self.tokenizer = tokenizer
        self.words = -(-tokenizer.vocab_size // 32)  # of 32 bits, in a mask
        self._strings = StringTokens(tokenizer)
        self._lock = Lock()
        # By grammar, the latest used last. These matchers stay at the beginning of their grammars;
        # sequences get copies.
        self._compiled: OrderedDict[str, Future[TokenMatcher]] = OrderedDict()

    def matcher(self, grammar: str) -> TokenMatcher:
        """A matcher at the beginning of a grammar; GrammarError if it does not compile."""
        with self._lock:
            known = self._compiled.get(grammar)
            compiled = self._compiled.setdefault(grammar, Future())
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        if known is None:
            # Without the lock: compiling may take long, and other threads wait for the future.
            try:
                compiled.set_result(self._compile(grammar))
            except BaseException as error:
                compiled.set_exception(error)
        return compiled.result().copy()

    def is_compiled(self, grammar: str) -> bool:
        """Whether `matcher` need not wait for a compilation."""
        with self._lock:
            compiled = self._compiled.get(grammar)
        return compiled is not None and compiled.done()

    def _compile(self, grammar: str) -> TokenMatcher:
        matcher, probe = compile_grammar(self.tokenizer, grammar), probe_of(grammar)
        if probe is None:
            return TokenMatcher(matcher)
        others = compile_grammar(self._strings.others, grammar)
        return TokenMatcher(
            matcher, StringMatcher(others, self._strings, self._strings.probes(probe))
        )


def grammars_of(model: Path, vocab_size: int, tokenizer: Path | None = None) -> Grammars | None:
    """The grammars of a model; None if its tokenizer cannot be used.

    `tokenizer` is the tokenizer's folder, if that is not the model's. Loading takes about a second
    with 150,000 tokens.
    """
    eos = list(eos_token_ids(model))
    try:
        path = str(tokenizer_file(tokenizer or model))
        return Grammars(LLTokenizer(path, n_vocab=vocab_size, eos_token=eos or None))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
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
