"""The gateway's door: who may come in, and how much each may ask for."""

import logging
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.gateway.accounts import Account, Permit
from pagewire.gateway.errors import ApiError
from pagewire.gateway.job import Job
from pagewire.gateway.keys import KeyRing

log = logging.getLogger(__name__)

# Load balancers ask these and have no key; they tell nothing about anybody.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})


def no_keys() -> KeyRing | None:
    """For a gateway that everybody may use who reaches it."""
    return None


class Guard:
    """Asks for an API key where there are some, and keeps an account for each."""

    def __init__(
        self,
        read: Callable[[], KeyRing | None] = no_keys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` gives the keys, now and at each `reload`; OSError or ValueError if it cannot."""
        self._read = read
        self._clock = clock
        self._keys = read()
        self._accounts: dict[str, Account] = {}

    @property
    def num_keys(self) -> int:
        """How many keys open the door; 0 if it stands open."""
        return 0 if self._keys is None else len(self._keys)

    def reload(self) -> None:
        """Reads the keys again; keys that cannot be read leave those there are."""
        try:
            keys = self._read()
        except (OSError, ValueError) as error:
            log.error("the API keys stay as they were: %s", error)
            return
        self._keys = keys
        names = set() if keys is None else keys.names
        self._accounts = {name: a for name, a in self._accounts.items() if name in names}
        log.info("%d API keys", self.num_keys)

    def admit(self, scope: Scope, job: Job) -> Permit:
        """Lets a checked request of a known caller in; ApiError if it asks for too much now."""
        account: Account | None = scope["state"].get("account")
        permit = Permit(None) if account is None else account.admit(job, self._clock())
        if account is not None:
            for request in job.requests:
                request.tenant = account.key.tenant
        scope["state"]["permit"] = permit
        return permit

    def watch(self, app: ASGIApp, generating: tuple[str, ...]) -> ASGIApp:
        """`app` for callers with a key; permits given meanwhile end with their request.

        What a key's limits refuse on the routes in `generating` is refused by its head if they do
        so whatever its body says: bodies that never arrive cost the places of their own key only.
        """

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or self._keys is None or scope["path"] in OPEN_PATHS:
                await app(scope, receive, send)
                return
            account = self._account(_bearer(scope), self._keys)
            if account is None:
                await _refusal(scope).response()(scope, receive, send)
                return

            async def with_limits(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], *account.headers(self._clock())]
                await send(message)

            state = scope.setdefault("state", {})
            state["account"] = account
            counts = scope["path"] in generating and scope["method"] == "POST"
            answering = app
            if counts:
                try:
                    account.check_head(self._clock())
                except ApiError as error:
                    answering = error.response()
            account.open += counts
            try:
                await answering(scope, receive, with_limits)
            finally:
                account.open -= counts
                if "permit" in state:
                    state["permit"].close(self._clock())

        return guarded

    def _account(self, presented: bytes | None, keys: KeyRing) -> Account | None:
        key = None if presented is None else keys.find(presented)
        if key is None:
            return None
        account = self._accounts.get(key.name)
        if account is None:
            account = self._accounts[key.name] = Account(key, self._clock())
        elif account.key is not key:
            account.renew(key, self._clock())
        return account


def _bearer(scope: Scope) -> bytes | None:
    """The token of the only `Authorization: Bearer` header."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return None
    scheme, _, token = given[0].partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


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
