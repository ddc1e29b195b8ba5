"""The keys that open a server, and the account of each."""

import logging
import time
from collections.abc import Callable

from pagewire.auth.accounts import Account
from pagewire.auth.keys import KeyRing

log = logging.getLogger(__name__)


def no_keys() -> KeyRing | None:
    """For a server that asks for no key."""
    return None


class Callers:
    """Finds the account of a key. An account belongs to a key's name, so a key that is replaced,
    or removed and added again, has used what it had used."""

    def __init__(
        self,
        read: Callable[[], KeyRing | None] = no_keys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` gives the keys, now and at each `reload`; OSError or ValueError if it cannot."""
        self.clock = clock
        self._read = read
        self._keys = read()
        self._accounts: dict[str, Account] = {}

    @property
    def have_keys(self) -> bool:
        """Whether a key is asked for."""
        return self._keys is not None

    @property
    def num_keys(self) -> int:
        """How many keys there are; 0 if none is asked for."""
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
        now = self.clock()
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if name in names or not account.at_rest(now)
        }
        log.info("%d API keys", self.num_keys)

    def find(self, presented: bytes | None) -> Account | None:
        """The account of the key that was presented; None if it is none of these."""
        key = None if presented is None or self._keys is None else self._keys.find(presented)
        if key is None:
            return None
        account = self._accounts.get(key.name)
        if account is None:
            account = self._accounts[key.name] = Account(key, self.clock())
        elif account.key is not key:
            account.renew(key, self.clock())
        return account
