"""The peers that a list of addresses stands for now."""

import logging
from collections.abc import Sequence

from pagewire.addresses import Address, Resolve
from pagewire.lifecycle.logs import LatestCause


class Targets:
    """The targets of addresses, resolved again and again.

    Those found earlier stay while an address cannot be resolved: a failing name server must not
    end streams.
    """

    def __init__(
        self, addresses: Sequence[Address], resolve_names: Resolve, log: logging.Logger
    ) -> None:
        """`log` receives one warning for each reason why an address cannot be resolved."""
        self._addresses = addresses
        self._resolve = resolve_names
        self._log = log
        self._found: dict[Address, list[str]] = {}
        self._faults = {address: LatestCause() for address in addresses}

    async def refresh(self) -> set[str]:
        """All targets now."""
        for address in self._addresses:
            try:
                self._found[address] = await self._resolve(address)
                self._faults[address].reported = ""
            except OSError as error:
                level = self._faults[address].level(str(error))
                self._log.log(level, "cannot resolve address %s: %s", address.text, error)
        return {target for targets in self._found.values() for target in targets}
