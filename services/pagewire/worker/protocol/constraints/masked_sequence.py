"""The constraint of one sequence, and its state after the output so far."""

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from pagewire.packing import Int32Array
from pagewire.worker.protocol.constraints.constraint import Constraint
from pagewire.worker.protocol.constraints.grammars import GrammarError, Grammars, first_line
from pagewire.worker.protocol.constraints.reasoning_budget import ReasoningBudget
from pagewire.worker.protocol.constraints.token_bans import (
    TokenBans,
    Words,
    clear_bits,
    set_bits,
)
from pagewire.worker.protocol.constraints.token_matcher import TokenMatcher

# The last prompt tokens, which are checked for `begin_after`.
PROMPT_TAIL = 64
# In llguidance's message about too many alternatives after a token, which the grammar allows.
_TOO_MANY = "Current row has"


class MaskedSequence:
    """Follows the output of a sequence and narrows the mask of its next token.

    Its state depends on the known tokens alone, so it can be rebuilt anywhere.
    """

    def __init__(
        self, constraint: Constraint, grammars: Grammars, prompt: Int32Array, output: Int32Array
    ) -> None:
        """GrammarError if the grammar does not compile or does not allow `output [generated]`."""
        self.index = 0  # of the next token of the output
        self.ended = False
        self._resumed = len(output)
        self._ends = frozenset(constraint.end_token_ids)
        self._end_ids = np.array(sorted(self._ends), np.int64)
        self._min_tokens = constraint.min_tokens
        self._grammar_field = constraint.grammar_field
        self._bans: TokenBans | None = None
        if len(constraint.allowed_token_ids) or len(constraint.banned_lengths):
            self._bans = TokenBans(constraint, grammars.words)
        self._budget: ReasoningBudget | None = None
        if constraint.reasoning_end:
            self._budget = ReasoningBudget(constraint, grammars.tokenizer)
        self._tokenizer: LLTokenizer | None = None
        self._matcher: TokenMatcher | None = None
        # The text after which the matcher begins; None once it has begun.
        self._awaited: bytes | None = constraint.begin_after.encode() or None
        self._tail = b""
        # Whether the matcher's mask needs no change, as nothing else allows or excludes tokens.
        self._plain = False
        if constraint.grammar:
            tokenizer = self._tokenizer = grammars.tokenizer
            self._matcher = grammars.matcher(constraint.grammar)
            self._eos_ids = np.array(tokenizer.eos_tokens, np.int64)
            same_ends = self._ends == set(tokenizer.eos_tokens)
            self._plain = same_ends and not constraint.min_tokens and self._bans is None
            if self._awaited is not None and _ends_with(tokenizer, prompt, self._awaited):
                self._awaited = None
        for token in output.tolist():
            self.advance(token)

    @property
    def matcher(self) -> LLMatcher | None:
        """The matcher that computes the mask of the next token; None before `begin_after`."""
        whole = self._matcher
        return None if self._awaited is not None or whole is None else whole.current

    def advance(self, token: int) -> None:
        """Takes the next token of the output; GrammarError if the grammar does not allow it."""
        self.index += 1
        if self.ended:
            return
        if self._budget is not None:
            self._budget.advance(token)
        if self._bans is not None:
            self._bans.advance(token)
        if token in self._ends:
            self.ended = True
        elif self._awaited is not None:
            self._await(token, self._awaited)
        elif self._matcher is not None and not self._matcher.consume(token):
            raise self._refused(token)

    def catch_up(self) -> None:
        """See `TokenMatcher.catch_up`."""
        if self._matcher is not None:
            self._matcher.catch_up()

    def forced_tokens(self) -> list[int]:
        """The tokens of the text that must come next, as the tokenizer splits it; may be empty."""
        if self.ended:
            return []
        if self._budget is not None and (forced := self._budget.forced_token) is not None:
            return [forced]
        if self._awaited is not None or self._matcher is None:
            return []
        return self._matcher.forced_tokens()

    def narrow(self, mask: Words) -> None:
        """Narrows `mask [words]`, which `matcher` has computed; writes it if `matcher` is None.

        GrammarError if no token is left.
        """
        forced = None if self._budget is None else self._budget.forced_token
        if forced is not None:
            mask[:] = 0
            set_bits(mask, np.array([forced], np.int64))
            return
        complete = False
        if self._matcher is not None and self._awaited is None:
            matcher = self._matcher.current
            if matcher.is_error():
                raise self._too_complex(self.index, first_line(matcher.get_error()))
            self._matcher.complete(mask)
            if self._plain:
                return
            complete = matcher.is_accepting()
            clear_bits(mask, self._eos_ids)
        else:
            mask[:] = -1
        if self._bans is not None:
            self._bans.narrow(mask)
        may_end = self._awaited is None and (complete or self._matcher is None)
        early: list[str] = []  # the field that takes the last tokens, if it does
        if self._awaited is not None:
            clear_bits(mask, self._end_ids)
        elif self.index < self._min_tokens:
            early = ["min_tokens"] if mask.any() else []
            clear_bits(mask, self._end_ids)
        elif complete:
            set_bits(mask, self._end_ids)
        if mask.any():
            return
        if not may_end or not self._ends:
            raise self._contradiction(early)
        set_bits(mask, self._end_ids)

    def _contradiction(self, others: list[str]) -> GrammarError:
        """The error for fields that together exclude every token, `others` among them."""
        fields = [] if self._bans is None else self._bans.fields()
        if self._matcher is not None:
            fields.append(self._grammar_field)
        fields += others
        return GrammarError(
            f"no token may come at index {self.index} of the output: {' and '.join(fields)} "
            "exclude all; change or remove one of these",
            fields[0],
        )

    def _await(self, token: int, awaited: bytes) -> None:
        """Looks for the text after which the matcher begins."""
        assert self._tokenizer is not None
        self._tail += self._tokenizer.decode_bytes([token])
        at = self._tail.find(awaited)
        if at < 0:
            self._tail = self._tail[-len(awaited) :]
            return
        self._awaited = None
        # The token may contain more than the text. The matcher gets the rest if the grammar allows
        # it.
        rest = self._tail[at + len(awaited) :]
        if rest and self._matcher is not None:
            tokens = self._tokenizer.tokenize_bytes(rest)
            if self._matcher.current.validate_tokens(tokens) == len(tokens):
                for each in tokens:
                    self._matcher.consume(each)

    def _refused(self, token: int) -> GrammarError:
        """The error for a token that the matcher has not consumed."""
        assert self._matcher is not None
        index, reason = self.index - 1, first_line(self._matcher.current.get_error())
        if _TOO_MANY in reason:
            return self._too_complex(index, reason)
        fault = f"the grammar does not allow token {token} at index {index} of the output: {reason}"
        if index >= self._resumed:
            return GrammarError(fault)
        # Tokens of a worker never contradict the grammar, so these are a client's.
        field = "resume_token_ids"
        return GrammarError(f"{field}: {fault}; give the output of an earlier attempt", field)

    def _too_complex(self, index: int, reason: str) -> GrammarError:
        """The error for a grammar that exceeds a limit of the matcher after its first token."""
        return GrammarError(
            f"the grammar is too complex at token {index} of the output: {reason}; simplify it",
            self._grammar_field,
        )


def _ends_with(tokenizer: LLTokenizer, prompt: Int32Array, text: bytes) -> bool:
    """Whether a prompt ends with a text, without trailing white space."""
    return tokenizer.decode_bytes(prompt[-PROMPT_TAIL:].tolist()).rstrip().endswith(text.rstrip())
