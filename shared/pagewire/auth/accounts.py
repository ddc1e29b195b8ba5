"""What each key has used of its limits.

Nothing here knows HTTP or gRPC: a refusal is a RequestError, which each server translates. The
caller has the clock; times are in seconds and never go back.
"""

import math

from pagewire.auth.costs import Cost
from pagewire.auth.keys import ApiKey
from pagewire.auth.rate_limits import TokenBucket
from pagewire.errors import Code, RequestError, invalid


class Account:
    """The use of one key. `running` and `open` are at least 0."""

    __slots__ = ("charged", "key", "open", "requests", "running", "tokens")

    def __init__(self, key: ApiKey, now: float) -> None:
        self.key = key
        self.open = 0  # requests that have not left
        self.running = 0  # prompts being answered, and one for each request still on its way
        self.charged = 0  # tokens, since the account was opened
        self.requests = _bucket(key.limits.requests_per_minute, None, now)
        self.tokens = _bucket(key.limits.tokens_per_minute, None, now)

    def renew(self, key: ApiKey, now: float) -> None:
        """The key was read again. What it has used still counts, under a changed limit too."""
        self.key = key
        self.requests = _bucket(key.limits.requests_per_minute, self.requests, now)
        self.tokens = _bucket(key.limits.tokens_per_minute, self.tokens, now)

    def at_rest(self, now: float) -> bool:
        """Whether a new account would be the same."""
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return self.open == 0 and all(b.level(now) >= b.per_minute for b in buckets)

    def enter(self, now: float, generates: bool = True) -> "Visit":
        """Lets a request in by its head, and counts it.

        RESOURCE_EXHAUSTED for one that would be refused whatever its body says; that one does not
        count. A request that does not generate has no part in tokens and prompts.
        """
        if generates:
            self._check_running(1)
        if self.requests is not None and (wait := self.requests.seconds_until(1, now)):
            limit = self.requests.per_minute
            raise _too_many(f"this API key may send {limit} requests a minute", wait)
        if generates:
            self._check_tokens(1, now)
        if self.requests is not None:
            self.requests.take(1, now)
        return Visit(self, int(generates))

    def headers(self, now: float) -> list[tuple[str, str]]:
        """What is left, under the names that OpenAI's clients read."""
        found: list[tuple[str, str]] = []
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                reset = bucket.seconds_until(bucket.per_minute, now)
                values = {
                    "limit": str(bucket.per_minute),
                    "remaining": str(max(0, int(bucket.level(now)))),
                    "reset": f"{reset:.3f}s",
                }
                found += [(f"x-ratelimit-{name}-{kind}", value) for name, value in values.items()]
        return found

    def _check_running(self, more: int, own: int = 0) -> None:
        """Whether `more` prompts may run beside those of other requests; `own` are its own."""
        most, others = self.key.limits.max_concurrent, self.running - own
        if most is not None and others + more > most:
            raise _too_many(
                f"{others} prompts of this API key are being answered and {most} may be", 1
            )

    def _check_tokens(self, tokens: int, now: float) -> None:
        if self.tokens is not None and (wait := self.tokens.seconds_until(tokens, now)):
            limit = self.tokens.per_minute
            raise _too_many(f"this API key may use {limit} tokens a minute", wait)


class Visit:
    """One request of a key, from its head to its end.

    `charged` are the tokens that it costs its key at this moment: what it may use while it runs,
    then what it has used.
    """

    __slots__ = ("_account", "_bucket", "_left", "charged", "prompts")

    def __init__(self, account: Account, prompts: int) -> None:
        self._account = account
        # A limit that is new since then has not been charged for it, and gets nothing back.
        self._bucket = account.tokens
        self._left = False
        self.charged = 0
        self.prompts = prompts
        account.open += 1
        account.running += prompts

    def admit(self, prompts: int, cost: Cost, now: float) -> None:
        """Reserves what the request asks for; called once, before it runs.

        RESOURCE_EXHAUSTED says how long to wait, INVALID_ARGUMENT that waiting does not help.
        """
        assert not self._left
        assert self.charged == 0
        account = self._account
        most = account.key.limits.max_concurrent
        if most is not None and prompts > most:
            raise invalid(
                "prompt",
                f"the request has {prompts} prompts; this API key may have {most} at once, send "
                "fewer in a request",
            )
        account._check_running(prompts, self.prompts)
        account._check_tokens(max(1, cost.least), now)
        account.running += prompts - self.prompts
        self.prompts = prompts
        self._bucket = account.tokens
        rest = 0.0 if self._bucket is None else self._bucket.level(now) - cost.least
        self._charge(cost.least + max(0, min(cost.without_limit, int(rest))), now)

    def leave(self, used: int, now: float) -> None:
        """The request has ended and has used so many tokens; called once."""
        assert not self._left
        self._left = True
        self._account.open -= 1
        self._account.running -= self.prompts
        assert self._account.open >= 0
        assert self._account.running >= 0
        self._charge(used, now)

    def correct(self, used: int, now: float) -> None:
        """What a request that has left had used is known better now."""
        assert self._left
        self._charge(used, now)

    def _charge(self, tokens: int, now: float) -> None:
        """`tokens` in place of what it was charged before."""
        difference, self.charged = tokens - self.charged, tokens
        self._account.charged += difference
        if self._bucket is not None:
            self._bucket.take(difference, now)


def _bucket(per_minute: int | None, before: TokenBucket | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if before is None:
        return TokenBucket(per_minute, now)
    before.resize(per_minute, now)
    return before


def _too_many(why: str, seconds: float) -> RequestError:
    wait = max(1, math.ceil(seconds))
    return RequestError(Code.RESOURCE_EXHAUSTED, f"{why}; retry in {wait} s", retry_after=wait)
