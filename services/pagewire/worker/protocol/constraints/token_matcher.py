"""The matcher of a sequence, with a second, faster one within strings of JSON."""

from dataclasses import dataclass

from llguidance import LLMatcher

from pagewire.worker.protocol.constraints.string_tokens import INSIDE, OUTSIDE, StringTokens
from pagewire.worker.protocol.constraints.token_bans import Words

# The fewest tokens that the other matcher gets at once: a call for each token would take twice as
# long.
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class StringMatcher:
    """Matches a grammar within its plain strings, see `probe_of`."""

    others: LLMatcher  # of all tokens except plain ones
    tokens: StringTokens
    probes: list[int]


class TokenMatcher:
    """Follows an output and determines which tokens may come next.

    Within a string, most tokens of a vocabulary may come, and a mask examines each. If the grammar
    accepts all plain characters there, a second matcher finds the few other tokens that may come.
    Only one of the two matchers has all tokens so far. The other gets them when it is needed, or
    earlier in `catch_up`.
    """

    def __init__(self, whole: LLMatcher, string: StringMatcher | None = None) -> None:
        """Takes over the matchers, which are at the beginning."""
        self.whole = self.current = whole
        self._string = string
        self._place = OUTSIDE
        self._behind: list[int] = []  # tokens that `current` has and the other matcher has not
        # Above 0: `current` is `others`, and this many plain characters may come. If `_bounded`,
        # more are not allowed.
        self._left = 0
        self._bounded = False

    def copy(self) -> "TokenMatcher":
        """A copy; both are at the beginning of the grammar."""
        string = self._string
        if string is not None:
            string = StringMatcher(string.others.deep_copy(), string.tokens, string.probes)
        return TokenMatcher(self.whole.deep_copy(), string)

    def consume(self, token: int) -> bool:
        """Takes the next token; False if the grammar does not allow it or a matcher gives up."""
        string = self._string
        if string is None:
            return self.whole.consume_token(token)
        tokens, before = string.tokens, self._place
        place = self._place = tokens.after[before][token]
        self._behind.append(token)
        if not self._left:
            # In a string whose next characters are a literal, plain tokens change nothing. After a
            # backslash they may.
            looks = place == INSIDE and not (before == INSIDE and tokens.lengths[token])
            return self.whole.consume_token(token) and (not looks or self._look(string))
        if place != INSIDE:
            self._left = 0
            taken = self._switch(string)
            self._behind.append(token)  # `others` does not have it
            return taken
        if not string.others.consume_tokens(tokens.spelled(token)):
            return False
        length = tokens.lengths[token]
        self._left -= length
        if not length or (self._left < tokens.longest and not self._bounded):
            return self._look(string)
        return self._left > 0 or self._switch(string)

    def forced_tokens(self) -> list[int]:
        """The tokens of the text that must come next; none within a plain string."""
        return [] if self._left else self.whole.compute_ff_tokens()

    def complete(self, mask: Words) -> None:
        """Completes a mask that `current` has computed."""
        if self._left and self._string is not None:
            self._string.tokens.allow(mask, self._left)

    def catch_up(self) -> None:
        """Does work ahead of `consume`; call it when no mask is due."""
        if self._string is not None and len(self._behind) >= _AT_ONCE:
            # An error is not lost: it appears when the matcher is needed.
            self._hand_on(self._string)

    def _look(self, string: StringMatcher) -> bool:
        """Finds out how many plain characters may come; False if the other matcher gives up."""
        self._left = 0
        if self.current.validate_tokens(string.probes[:1]):
            self._left = self.current.validate_tokens(string.probes)
        self._bounded = self._left < len(string.probes)
        expected = string.others if self._left else self.whole
        return self.current is expected or self._switch(string)

    def _switch(self, string: StringMatcher) -> bool:
        """Makes the other matcher `current`; False if it gives up."""
        taken = self._hand_on(string)
        self.current = self.whole if self.current is string.others else string.others
        return taken

    def _hand_on(self, string: StringMatcher) -> bool:
        """Sends the other matcher the tokens that it lacks; False if it gives up."""
        behind, self._behind = self._behind, []
        if self.current is string.others:
            return self.whole.consume_tokens(behind)
        return string.others.consume_tokens(
            [i for each in behind for i in string.tokens.spelled(each)]
        )
