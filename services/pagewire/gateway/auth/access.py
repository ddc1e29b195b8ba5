"""The gateway's door: who may come in, and how much each may ask for."""

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.auth.callers import Callers, no_keys
from pagewire.auth.keys import KeyRing, bearer
from pagewire.errors import RequestError
from pagewire.gateway.api.job import Job
from pagewire.gateway.auth.bill import Bill
from pagewire.gateway.errors import ApiError

# Load balancers ask these and have no key; they tell nothing about anybody.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class AccessControl:
    """Asks for an API key where there are some, and keeps an account for each."""

    def __init__(
        self,
        read: Callable[[], KeyRing | None] = no_keys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` gives the keys, now and at each `reload`; OSError or ValueError if it cannot."""
        self._clock = clock
        self._callers = Callers(read, clock)
        self.reload = self._callers.reload

    @property
    def num_keys(self) -> int:
        """How many keys open the door; 0 if it stands open."""
        return self._callers.num_keys

    def admit(self, scope: Scope, job: Job, max_model_len: int) -> Bill | None:
        """Lets a checked request of a known caller in; RequestError if it asks for too much now.

        None where no key is asked for.
        """
        state = scope["state"]
        if "visit" not in state:
            return None
        for request in job.requests:
            request.tenant = state["account"].key.tenant
        bill = Bill(state["visit"], job, max_model_len, self._clock)
        state["bill"] = bill
        return bill

    def watch(self, app: ASGIApp, generating: tuple[str, ...]) -> ASGIApp:
        """`app` for callers with a key; what their requests used is settled when they end.

        A request on the routes in `generating` counts once its head was let in, whatever becomes
        of it. What a key's limits refuse whatever its body says is refused by the head: bodies
        that never arrive cost the places of their own key only.
        """

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            open_to_all = not self._callers.have_keys or scope.get("path") in OPEN_PATHS
            if scope["type"] != "http" or open_to_all:
                await app(scope, receive, send)
                return
            account = self._callers.find(_shown(scope))
            if account is None:
                await _refusal(scope).response()(scope, receive, send)
                return

            async def with_limits(message: Message) -> None:
                if message["type"] == "http.response.start":
                    limits = account.headers(self._clock())
                    left = [(name.encode(), value.encode()) for name, value in limits]
                    message["headers"] = [*message["headers"], *left]
                await send(message)

            state = scope.setdefault("state", {})
            if scope["path"] not in generating or scope["method"] != "POST":
                await app(scope, receive, with_limits)
                return
            try:
                visit = account.begin_request(self._clock())
            except RequestError as error:
                await ApiError.of(error).response()(scope, receive, with_limits)
                return
            state["account"], state["visit"] = account, visit
            try:
                await app(scope, receive, with_limits)
            finally:
                if "bill" in state:
                    state["bill"].close()
                else:
                    visit.end(0, self._clock())

        return guarded


def _shown(scope: Scope) -> bytes | None:
    """The token of the only `Authorization: Bearer` header."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    return bearer(given[0]) if len(given) == 1 else None


def _refusal(scope: Scope) -> ApiError:
    given = any(name == b"authorization" for name, _ in scope["headers"])
    what = "this API key is not valid" if given else "the request has no API key"
    return ApiError(
        401,
        f"{what}; send one as `Authorization: Bearer KEY`",
        code="invalid_api_key",
        # The body may be large and is not read.
        headers={"www-authenticate": "Bearer", "connection": "close"},
    )
