"""Access control at the HTTP port: which keys may send requests, and how many."""

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.auth.callers import Callers, no_keys
from pagewire.auth.keys import KeyRing, bearer
from pagewire.errors import RequestError
from pagewire.gateway.api.job import Job
from pagewire.gateway.auth.charge import Charge
from pagewire.gateway.error_responses import error_response
from pagewire.gateway.errors import ApiError

# Load balancers request these without a key; the answers reveal nothing about clients.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/ping"})


class AccessControl:
    """Requires an API key where keys are configured, and keeps an account for each key."""

    def __init__(
        self,
        read: Callable[[], KeyRing | None] = no_keys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` returns the keys, now and at each `reload`, or raises OSError or ValueError."""
        self._clock = clock
        self._callers = Callers(read, clock)
        self.reload = self._callers.reload

    @property
    def num_keys(self) -> int:
        """The number of keys; 0 if none is required."""
        return self._callers.num_keys

    def charge(self, scope: Scope, job: Job, max_model_len: int) -> Charge | None:
        """Reserves the tokens of a job; RequestError if its key may not use this many now.

        None where no key is required. `wrap` closes the charge when the request ends.
        """
        state = scope["state"]
        if "visit" not in state:
            return None
        for request in job.requests:
            request.tenant = state["account"].key.tenant
        charge = Charge(state["visit"], job, max_model_len, self._clock)
        state["charge"] = charge
        return charge

    def wrap(
        self,
        app: ASGIApp,
        generating: tuple[str, ...],
        counted: tuple[str, ...] = (),
        open_paths: frozenset[str] = OPEN_PATHS,
        operator_paths: frozenset[str] = frozenset(),
    ) -> ASGIApp:
        """`app` behind a check of each request's key and of the key's limits.

        A request to a path in `operator_paths` needs an operator's key.
        A request to a path in `counted` counts only against its key's requests per minute. A
        request to a path in `generating` counts as soon as its head has arrived. If the limits
        refuse it for any body, the body is not read: bodies that never arrive block only their
        own key.
        """

        async def with_access_control(scope: Scope, receive: Receive, send: Send) -> None:
            is_open = not self._callers.have_keys or scope.get("path") in open_paths
            if scope["type"] != "http" or is_open:
                await app(scope, receive, send)
                return
            account = self._callers.find(_presented_key(scope))
            if account is None:
                refusal = error_response(_unauthorized(scope), scope)
                await refusal(scope, receive, send)
                return

            if scope["path"] in operator_paths and not account.key.operator:
                refusal = error_response(_not_an_operator(account.key.name), scope)
                await refusal(scope, receive, send)
                return

            async def send_with_limits(message: Message) -> None:
                if message["type"] == "http.response.start":
                    limits = account.headers(self._clock())
                    encoded = [(name.encode(), value.encode()) for name, value in limits]
                    message["headers"] = [*message["headers"], *encoded]
                await send(message)

            state = scope.setdefault("state", {})
            generates = scope["path"] in generating
            counts = generates or scope["path"] in counted
            if not counts or scope["method"] != "POST":
                await app(scope, receive, send_with_limits)
                return
            try:
                visit = account.begin_request(self._clock(), generates)
            except RequestError as error:
                refusal = error_response(ApiError.of(error), scope)
                await refusal(scope, receive, send_with_limits)
                return
            state["account"], state["visit"] = account, visit
            try:
                await app(scope, receive, send_with_limits)
            finally:
                if "charge" in state:
                    state["charge"].close()
                else:
                    visit.end(0, self._clock())

        return with_access_control


def _presented_key(scope: Scope) -> bytes | None:
    """The token of the only `Authorization: Bearer` header, or the only `x-api-key` without one.

    None if there is not exactly one.
    """
    tokens = [value for name, value in scope["headers"] if name == b"authorization"]
    if tokens:
        return bearer(tokens[0]) if len(tokens) == 1 else None
    keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
    return keys[0] if len(keys) == 1 else None


def _not_an_operator(name: str) -> ApiError:
    return ApiError(
        403,
        f"the key {name!r} is not an operator's; give its line in the key file `operator: true`, "
        "or use another key",
        code="operator_key_required",
    )


def _unauthorized(scope: Scope) -> ApiError:
    has_key = any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
    reason = "this API key is not valid" if has_key else "the request has no API key"
    return ApiError(
        401,
        f"{reason}; send one as `Authorization: Bearer KEY` or `x-api-key: KEY` (`pagewire` takes "
        "it from the environment variable PAGEWIRE_API_KEY, OpenAI's client from OPENAI_API_KEY)",
        code="invalid_api_key",
        # The body may be large and is not read.
        headers={"www-authenticate": "Bearer", "connection": "close"},
    )
