"""The use of each API key's limits.

The caller passes the time in seconds, on a clock that never goes back.
"""

import math

from pagewire.auth.costs import Cost
from pagewire.auth.keys import ApiKey
from pagewire.auth.rate_limits import TokenBucket
from pagewire.errors import Code, RequestError, invalid


class Account:
    """The use of one key. `open` and `running` are never negative."""

    __slots__ = ("charged", "key", "open", "requests", "running", "tokens")

    def __init__(self, key: ApiKey, now: float) -> None:
        self.key = key
        self.open = 0  # requests that have not ended
        self.running = 0  # prompts of reserved requests, and one for each request that is not
        self.charged = 0  # tokens since the account was made
        self.requests = _bucket(key.limits.requests_per_minute, None, now)
        self.tokens = _bucket(key.limits.tokens_per_minute, None, now)

    def renew(self, key: ApiKey, now: float) -> None:
        """Applies the limits of a key that was read again. Its earlier use still counts."""
        self.key = key
        self.requests = _bucket(key.limits.requests_per_minute, self.requests, now)
        self.tokens = _bucket(key.limits.tokens_per_minute, self.tokens, now)

    def is_unused(self, now: float) -> bool:
        """Whether a new account would be the same, so that this one can be dropped."""
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return self.open == 0 and all(b.level(now) >= b.per_minute for b in buckets)

    def begin_request(self, now: float, generates: bool = True) -> "AccountedRequest":
        """Counts a request whose body has not been read yet.

        RESOURCE_EXHAUSTED if every body would be refused; such a request does not count. A request
        that does not generate counts only against the requests a minute.
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
        return AccountedRequest(self, int(generates))

    def headers(self, now: float) -> list[tuple[str, str]]:
        """Response headers with the limits and the rest of each, with OpenAI's names."""
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
        """RESOURCE_EXHAUSTED if a request may not run `more` prompts. `own` is how many of its
        prompts `running` already counts."""
        limit, others = self.key.limits.max_concurrent, self.running - own
        if limit is not None and others + more > limit:
            raise _too_many(
                f"this API key may run {limit} prompts at once and {others} are running", 1
            )

    def _check_tokens(self, tokens: int, now: float) -> None:
        if self.tokens is not None and (wait := self.tokens.seconds_until(tokens, now)):
            limit = self.tokens.per_minute
            raise _too_many(f"this API key may use {limit} tokens a minute", wait)


class AccountedRequest:
    """One request of a key, from its beginning to its end.

    `charged` are the tokens charged to the key for it: while it runs, the most that it may use;
    after its end, its real use.
    """

    __slots__ = ("_account", "_bucket", "_ended", "charged", "prompts")

    def __init__(self, account: Account, prompts: int) -> None:
        self._account = account
        # Kept, so that a later bucket gets no credit for tokens that this bucket was charged.
        self._bucket = account.tokens
        self._ended = False
        self.charged = 0
        self.prompts = prompts
        account.open += 1
        account.running += prompts

    def reserve(self, prompts: int, cost: Cost, now: float) -> None:
        """Charges the most that the request may use; called once, before it runs.

        RESOURCE_EXHAUSTED if the key has too little left now, INVALID_ARGUMENT if the request has
        more prompts than the key may ever run.
        """
        assert not self._ended
        assert self.charged == 0
        account = self._account
        limit = account.key.limits.max_concurrent
        if limit is not None and prompts > limit:
            raise invalid(
                "prompt",
                f"the request has {prompts} prompts; this API key may have {limit} at once, send "
                "fewer in a request",
            )
        account._check_running(prompts, self.prompts)
        account._check_tokens(max(1, cost.required), now)
        account.running += prompts - self.prompts
        self.prompts = prompts
        self._bucket = account.tokens
        rest = 0.0 if self._bucket is None else self._bucket.level(now) - cost.required
        self._charge(cost.required + max(0, min(cost.without_limit, int(rest))), now)

    def end(self, used: int, now: float) -> None:
        """The request has ended and used this many tokens; called once."""
        assert not self._ended
        self._ended = True
        self._account.open -= 1
        self._account.running -= self.prompts
        assert self._account.open >= 0
        assert self._account.running >= 0
        self._charge(used, now)

    def correct(self, used: int, now: float) -> None:
        """Charges a more exact number for a request that has ended."""
        assert self._ended
        self._charge(used, now)

    def _charge(self, tokens: int, now: float) -> None:
        """Replaces the number of charged tokens."""
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
