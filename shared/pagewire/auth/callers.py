"""The API keys of a server, and the account of each."""

import logging
import time
from collections.abc import Callable

from pagewire.auth.accounts import Account
from pagewire.auth.keys import KeyRing

log = logging.getLogger(__name__)


def no_keys() -> KeyRing | None:
    """No keys: for a server that needs none."""
    return None


class Callers:
    """Finds the account of a key.

    An account belongs to the key's name. A key that is replaced, or removed and added again, keeps
    its account.
    """

    def __init__(
        self,
        read: Callable[[], KeyRing | None] = no_keys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` returns the keys, now and at each `reload`; it may raise OSError or ValueError."""
        self.clock = clock
        self._read = read
        self._keys = read()
        self._accounts: dict[str, Account] = {}

    @property
    def have_keys(self) -> bool:
        """Whether callers need a key."""
        return self._keys is not None

    @property
    def num_keys(self) -> int:
        """The number of keys; 0 if callers need none."""
        return 0 if self._keys is None else len(self._keys)

    def reload(self) -> None:
        """Reads the keys again; if that fails, the present keys stay in use."""
        try:
            keys = self._read()
        except (OSError, ValueError) as error:
            log.error("the API keys stay as they were, reading them again failed: %s", error)
            return
        self._keys = keys
        names = set() if keys is None else keys.names
        now = self.clock()
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if name in names or not account.is_unused(now)
        }
        log.info("%d API keys", self.num_keys)

    def find(self, presented: bytes | None) -> Account | None:
        """The account of a presented key; None if the key is unknown."""
        key = None if presented is None or self._keys is None else self._keys.find(presented)
        if key is None:
            return None
        account = self._accounts.get(key.name)
        if account is None:
            account = self._accounts[key.name] = Account(key, self.clock())
        elif account.key is not key:
            account.renew(key, self.clock())
        return account
