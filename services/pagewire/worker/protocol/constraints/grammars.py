"""Compiled grammars of a model, and the matchers made from them."""

import logging
import os
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from weakref import WeakSet

from llguidance import LLMatcher, LLTokenizer

from pagewire.grammars.limits import parser_limits
from pagewire.models import eos_token_ids
from pagewire.tokenizer_conversion import tokenizer_file
from pagewire.worker.protocol.constraints.plain_strings import probe_of
from pagewire.worker.protocol.constraints.string_tokens import StringTokens
from pagewire.worker.protocol.constraints.token_matcher import StringMatcher, TokenMatcher

log = logging.getLogger(__name__)

# Compilations that are kept. One takes some 100 KB; a schema may be compiled for two matchers.
MAX_COMPILED = 512
# Copies of a compilation share its lexer, which computes one mask at a time. So a grammar that
# compiles within this many seconds is compiled again for sequences that run at the same time.
QUICK_SECONDS = 0.02
# The most compilations of one grammar. On one or two cores further ones do not save time.
MAX_LEXERS = 256 if (os.cpu_count() or 1) > 2 else 1


class GrammarError(Exception):
    """A grammar that does not compile, or output that it does not allow.

    `field` is that of the request at fault; empty if it is not the request's fault.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(eq=False, slots=True)
class Lexer:
    """One compilation of a grammar, and the sequences that share it."""

    matcher: TokenMatcher  # at the beginning of the grammar; sequences get copies
    users: WeakSet[object] = field(default_factory=WeakSet)


@dataclass(eq=False, slots=True)
class Compiled:
    """The compilations of one grammar."""

    first: Future[TokenMatcher] = field(default_factory=Future)
    seconds: float = 0.0  # that the first compilation took
    lexers: list[Lexer] = field(default_factory=list)


class Grammars:
    """Compiles grammars and keeps them. Threads may share it."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        """`tokenizer` is that of the model, padded to its vocabulary."""
        self.tokenizer = tokenizer
        self.words = -(-tokenizer.vocab_size // 32)  # of 32 bits, in a mask
        self._strings = StringTokens(tokenizer)
        self._lock = Lock()
        # By grammar, the latest used last.
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()

    def matcher(self, grammar: str, user: object) -> tuple[TokenMatcher, Lexer]:
        """A matcher at the beginning of a grammar, and the lexer that it shares with others.

        `user` stays among the lexer's users for as long as it lives. GrammarError if the grammar
        does not compile.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            mine = compiled is None
            if compiled is None:
                compiled = self._compiled[grammar] = Compiled()
            self._compiled.move_to_end(grammar)
        if mine:
            # Without the lock: compiling may take long, and others wait for the future.
            began = time.perf_counter()
            try:
                matcher = self._compile(grammar)
            except BaseException as error:
                compiled.first.set_exception(error)
            else:
                compiled.seconds = time.perf_counter() - began
                compiled.lexers.append(Lexer(matcher))
                compiled.first.set_result(matcher)
        compiled.first.result()
        lexer = self._choose(compiled, user)
        if lexer is None:
            lexer = Lexer(self._compile(grammar))
            lexer.users.add(user)
            with self._lock:
                compiled.lexers.append(lexer)
        self._forget()
        return lexer.matcher.copy(), lexer

    def _compile(self, grammar: str) -> TokenMatcher:
        matcher, probe = compile_grammar(self.tokenizer, grammar), probe_of(grammar)
        if probe is None:
            return TokenMatcher(matcher)
        others = compile_grammar(self._strings.others, grammar)
        return TokenMatcher(
            matcher, StringMatcher(others, self._strings, self._strings.probes(probe))
        )

    def _choose(self, compiled: Compiled, user: object) -> Lexer | None:
        """The lexer with the fewest users, to which `user` is added; None: compile another."""
        with self._lock:
            lexer = min(compiled.lexers, key=lambda each: len(each.users))
            quick = compiled.seconds < QUICK_SECONDS and len(compiled.lexers) < MAX_LEXERS
            if lexer.users and quick:
                return None
            lexer.users.add(user)
            return lexer

    def _forget(self) -> None:
        """Drops the grammars that were used longest ago, down to `MAX_COMPILED`."""
        with self._lock:
            kept = sum(max(1, len(each.lexers)) for each in self._compiled.values())
            while kept > MAX_COMPILED and len(self._compiled) > 1:
                _, dropped = self._compiled.popitem(last=False)
                kept -= max(1, len(dropped.lexers))


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
