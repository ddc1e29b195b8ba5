"""The accounts of keys under any sequence of events: nothing is charged twice, lost or kept."""

import hashlib
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pagewire.auth.accounts import Account, AccountedRequest
from pagewire.auth.callers import Callers
from pagewire.auth.costs import Cost
from pagewire.auth.keys import ApiKey, KeyRing
from pagewire.auth.rate_limits import RateLimits
from pagewire.errors import Code, RequestError

NAMES = ("ada", "bob")
LIMIT = st.none() | st.integers(1, 40)
LIMITS = st.builds(RateLimits, LIMIT, st.none() | st.integers(1, 400), st.none() | LIMIT)
COST = st.builds(Cost, st.integers(0, 60), st.integers(0, 120), st.integers(0, 200))
USED = st.integers(0, 300)


def presented(name: str) -> bytes:
    return f"the key of {name}".encode()


def key_of(name: str, limits: RateLimits) -> ApiKey:
    return ApiKey(name, hashlib.sha256(presented(name)).digest(), name, limits)


@dataclass(eq=False)
class Request:
    """One request as a server sees it."""

    account: Account
    visit: AccountedRequest
    prompts: int
    admitted: bool = False


class Accounts(RuleBasedStateMachine):
    arriving = Bundle("arriving")
    running = Bundle("running")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.there = {name: key_of(name, RateLimits(20, 200, 8)) for name in NAMES}
        self.callers = Callers(lambda: KeyRing(self.there.values()), lambda: self.now)
        self.accounts: list[Account] = []  # all accounts so far
        self.open: list[Request] = []
        # Tokens that ended requests used, by account.
        self.used: dict[Account, int] = {}
        # Accounts without a refill so far, under unchanged limits.
        self.exact: set[Account] = set()

    def find(self, name: str) -> Account | None:
        account = self.callers.find(presented(name))
        assert (account is None) == (name not in self.there)
        if account is not None and account not in self.used:
            self.accounts.append(account)
            self.used[account] = 0
            self.exact.add(account)
        if account is not None and account.tokens is None:
            self.exact.discard(account)
        return account

    @rule(target=arriving, name=st.sampled_from(NAMES), generates=st.booleans())
    def enter(self, name: str, generates: bool) -> Request | None:
        account = self.find(name)
        if account is None:
            return None
        limits = account.key.limits
        before = _levels(account, self.now)
        places = account.running
        try:
            visit = account.begin_request(self.now, generates)
        except RequestError as error:
            refused = error
        else:
            refused = None
        if refused is not None:
            assert refused.code is Code.RESOURCE_EXHAUSTED
            assert refused.retry_after is not None
            assert refused.retry_after >= 1
            assert _levels(account, self.now) == before, "what is refused does not count"
            return None
        assert before[0] is None or before[0] >= 1
        if generates:
            assert before[1] is None or before[1] >= min(1, limits.tokens_per_minute or 1)
            assert limits.max_concurrent is None or places < limits.max_concurrent
        request = Request(account, visit, int(generates))
        self.open.append(request)
        return request

    @rule(target=running, request=consumes(arriving), prompts=st.integers(1, 6), cost=COST)
    def admit(self, request: Request | None, prompts: int, cost: Cost) -> Request | None:
        if request is None or request.prompts == 0:
            if request is not None:
                self._leave(request, 0)
            return None
        most = request.account.key.limits.max_concurrent
        try:
            request.visit.reserve(prompts, cost, self.now)
        except RequestError as error:
            no_use = error.code is Code.INVALID_ARGUMENT
            self._leave(request, 0)
        else:
            no_use = None
        if no_use is not None:
            assert no_use == (most is not None and prompts > most)
            return None
        request.prompts = prompts
        request.admitted = True
        assert request.visit.charged >= cost.required
        assert request.visit.charged <= cost.required + cost.without_limit
        return request

    @rule(target=ended, request=consumes(running), used=USED)
    def end(self, request: Request | None, used: int) -> Request | None:
        """Completed, failed, aborted or cut off: no difference."""
        if request is None:
            return None
        self._leave(request, used)
        return request

    @rule(request=consumes(arriving))
    def go_away(self, request: Request | None) -> None:
        """The body never arrived, or was not valid."""
        if request is not None:
            self._leave(request, 0)

    @rule(request=ended, used=USED)
    def correct(self, request: Request | None, used: int) -> None:
        """Reported late, any number of times."""
        if request is not None:
            self.used[request.account] += used - request.visit.charged
            request.visit.correct(used, self.now)

    @rule(seconds=st.floats(0, 90))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.exact.clear()

    @rule(name=st.sampled_from(NAMES), limits=st.none() | LIMITS)
    def reload(self, name: str, limits: RateLimits | None) -> None:
        """Changes a key's limits, adds it, or removes it."""
        before = self.find(name)
        debts = None if before is None else _missing(before, self.now)
        self.there.pop(name, None)
        if limits is not None:
            self.there[name] = key_of(name, limits)
        self.callers.reload()
        after = self.find(name)
        if before is None or after is None or debts is None:
            return
        assert after is before
        for old, new in zip(debts, _missing(after, self.now), strict=True):
            # None stands for a missing limit, now or before.
            assert old is None or new is None or abs(old - new) < 1e-6

    @invariant()
    def every_charge_is_held_by_a_request_or_was_used(self) -> None:
        for account in self.accounts:
            mine = [request for request in self.open if request.account is account]
            assert account.open == len(mine)
            assert account.running == sum(request.prompts for request in mine)
            held = sum(request.visit.charged for request in mine)
            assert account.charged == held + self.used[account]

    @invariant()
    def the_bucket_bears_what_is_charged(self) -> None:
        for account in self.exact:
            assert account.tokens is not None
            missing = account.tokens.per_minute - account.tokens.level(self.now)
            assert abs(missing - account.charged) < 1e-6

    @invariant()
    def no_account_of_a_key_in_use_is_forgotten(self) -> None:
        for request in self.open:
            name = request.account.key.name
            if name in self.there:
                assert self.find(name) is request.account

    def teardown(self) -> None:
        for request in list(self.open):
            self._leave(request, 7 if request.admitted else 0)
        for account in self.accounts:
            assert (account.open, account.running) == (0, 0)
            assert account.charged == self.used[account]

    def _leave(self, request: Request, used: int) -> None:
        request.visit.end(used, self.now)
        self.open.remove(request)
        self.used[request.account] += used


def _levels(account: Account, now: float) -> tuple[float | None, float | None]:
    requests, tokens = account.requests, account.tokens
    return (
        None if requests is None else requests.level(now),
        None if tokens is None else tokens.level(now),
    )


def _missing(account: Account, now: float) -> list[float | None]:
    """The tokens that were taken and not refilled."""
    buckets = (account.requests, account.tokens)
    return [None if b is None else b.per_minute - b.level(now) for b in buckets]


Accounts.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestAccounts = Accounts.TestCase
