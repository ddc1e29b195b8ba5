"""Compiled grammars of a model, and the matchers made from them."""

from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from pagewire.grammar_limits import parser_limits
from pagewire.models import eos_token_ids
from pagewire.tokenizer_conversion import has_tokenizer, tokenizer_file

# Compiled grammars that are kept. One takes some 100 KB.
MAX_COMPILED = 256


class GrammarError(Exception):
    """A grammar that does not compile, or output that it does not allow."""


class Grammars:
    """Compiles each grammar once. Threads may share it."""

    def __init__(self, folder: Path, vocab_size: int, tokenizer: Path | None = None) -> None:
        """Reads nothing yet: the tokenizer is loaded when the first grammar comes.

        `folder` is the model's, and `tokenizer` that of its tokenizer, if it is another one.
        """
        self._folder = folder
        self._tokenizer_folder = tokenizer or folder
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        # By grammar, the latest used last. Copies share what the lexer has learned.
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    @property
    def words(self) -> int:
        """Words of 32 bits in a mask."""
        return -(-self._vocab_size // 32)

    @property
    def tokenizer(self) -> LLTokenizer:
        """The tokenizer of the model; the first call takes about a second."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = read_tokenizer(
                    self._folder, self._tokenizer_folder, self._vocab_size
                )
            return self._tokenizer

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


def grammars_of(folder: Path, vocab_size: int, tokenizer: Path | None = None) -> Grammars | None:
    """The grammars of the model in a folder; None if it has no tokenizer.

    `tokenizer` is the folder of its tokenizer, if that is another one.
    """
    if not has_tokenizer(tokenizer or folder):
        return None
    return Grammars(folder, vocab_size, tokenizer)


def read_tokenizer(model: Path, tokenizer: Path, vocab_size: int) -> LLTokenizer:
    """The tokenizer of a model, padded to the model's vocabulary."""
    eos = list(eos_token_ids(model))
    file = tokenizer_file(tokenizer)
    return LLTokenizer(str(file), n_vocab=vocab_size, eos_token=eos or None)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a grammar; GrammarError if it does not compile."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    return matcher


def first_line(error: str) -> str:
    """The part of a message of llguidance that is for users."""
    return error.partition("\n<non-verbose/>")[0].strip()
