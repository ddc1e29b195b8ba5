"""The share of the gateway's limits that the open requests of each model use."""

from collections import defaultdict
from dataclasses import dataclass


@dataclass(slots=True)
class _Use:
    requests: int = 0
    num_bytes: int = 0


class ModelShares:
    """With several models, each may use an equal share of the limits.

    Requests for a model that is lost or overloaded stay open for long. Equal shares leave room for
    requests of the other models.
    """

    def __init__(self, max_open: int, max_bytes: int) -> None:
        """The limits of all models together: open requests, and bytes of their bodies."""
        self._max_open = max_open
        self._max_bytes = max_bytes
        self._uses: defaultdict[str, _Use] = defaultdict(_Use)

    def take(self, model: str, num_bytes: int, num_models: int) -> str | None:
        """Counts a request with a body of `num_bytes`; if it is refused, returns the reason.

        A model without open requests may always have one.
        """
        use = self._uses[model]
        if num_models > 1 and use.requests:
            if use.requests >= self._max_open // num_models:
                return f"{use.requests} requests for the model {model!r} are being answered already"
            if use.num_bytes + num_bytes > self._max_bytes // num_models:
                return (
                    f"the requests for the model {model!r} that are being answered have bodies of "
                    f"{use.num_bytes} bytes already"
                )
        use.requests += 1
        use.num_bytes += num_bytes
        return None

    def give_back(self, model: str, num_bytes: int) -> None:
        """A request that was counted has ended."""
        use = self._uses[model]
        use.requests -= 1
        use.num_bytes -= num_bytes
        if not use.requests:
            del self._uses[model]
