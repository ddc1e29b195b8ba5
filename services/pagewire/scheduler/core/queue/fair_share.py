"""The policy `fair-share`."""

from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence

# Estimated output tokens of a tenant's request before any has ended.
FIRST_ESTIMATE = 128
# Above this many tenants, those that are not ahead of the current virtual time are removed.
MAX_TENANTS = 4096


class FairShare(SchedulingPolicy):
    """Tenants with waiting requests get equal shares of the tokens computed.

    This is start-time fair queueing. Each tenant has a virtual time, the tokens that it was served.
    The tenant with the earliest time is next, and the time of the latest admission is the current
    virtual time. A tenant that returns after a pause starts at the current time, so a pause earns
    no credit. Cached tokens cost nothing. Output is charged at admission, at the tenant's mean, and
    corrected when the sequence leaves. Within a tenant, requests are served in order of arrival.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0
        # Virtual time by tenant; a missing one is at `_now`.
        self._served: dict[str, int] = {}
        self._mean_output: dict[str, int] = {}
        # Output tokens charged to each running sequence.
        self._charged: dict[Sequence, int] = {}

    def group(self, sequence: Sequence) -> str:
        """The tenant."""
        return sequence.tenant

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Order of first admission, then of arrival."""
        return (1, sequence.arrival) if sequence.place < 0 else (0, sequence.place)

    def rank(self, sequence: Sequence) -> int:
        """Its tenant's virtual time; -1, the first, if it was admitted before."""
        return self._time(sequence.tenant) if sequence.place < 0 else -1

    def group_waits(self, sequence: Sequence) -> None:
        """Moves the tenant to the current virtual time, if it is behind."""
        self._served[sequence.tenant] = max(self._now, self._time(sequence.tenant))
        if len(self._served) > MAX_TENANTS:
            self._served = {t: time for t, time in self._served.items() if time > self._now}
            self._mean_output = {t: self._mean_output.get(t, FIRST_ESTIMATE) for t in self._served}

    def admitted(self, sequence: Sequence) -> None:
        """Charges the tokens to compute, and an estimate of the output."""
        tenant = sequence.tenant
        if sequence.place < 0:
            self._now = max(self._now, self._time(tenant))
        super().admitted(sequence)
        estimate = self._mean_output.get(tenant, FIRST_ESTIMATE)
        output = min(estimate, sequence.max_tokens - len(sequence.output))
        self._charged[sequence] = output
        prompt = sequence.num_known - sequence.num_computed
        self._served[tenant] = self._time(tenant) + prompt + output

    def left(self, sequence: Sequence) -> None:
        """Corrects the charge for the output, and updates the tenant's mean."""
        tenant = sequence.tenant
        output = len(sequence.output) - sequence.num_generated
        self._served[tenant] = max(0, self._time(tenant) + output - self._charged.pop(sequence))
        mean = self._mean_output.get(tenant, FIRST_ESTIMATE)
        self._mean_output[tenant] = mean + (output - mean) // 8

    def _time(self, tenant: str) -> int:
        return self._served.get(tenant, self._now)
