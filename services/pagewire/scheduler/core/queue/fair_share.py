"""The policy `fair-share`."""

from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.sequence import Sequence

FIRST_GUESS = 128
MAX_TENANTS = 4096


class FairShare(SchedulingPolicy):
    """Tenants that have work waiting get equal shares of the tokens computed.

    Start-time fair queueing: each tenant has a virtual time, the tokens it was served. The next
    admission is of the tenant whose time is earliest, and virtual time is that of the latest
    admission; a tenant that comes back after a pause starts there, so that idleness earns no
    credit. Cached tokens cost nothing. Output is charged at admission as the tenant's mean and
    corrected when the sequence leaves. Within a tenant it is first come, first served.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0
        # Virtual time by tenant; a tenant that is missing stands at `_now`.
        self._served: dict[str, int] = {}
        self._mean_output: dict[str, int] = {}
        self._charged: dict[Sequence, int] = {}

    def group(self, sequence: Sequence) -> str:
        """A line for each tenant."""
        return sequence.tenant

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        """Order of first admission, then of arrival."""
        return (1, sequence.arrival) if sequence.place < 0 else (0, sequence.place)

    def rank(self, sequence: Sequence) -> int:
        """Its tenant's virtual time; before all of them if it was admitted before."""
        return self._time(sequence.tenant) if sequence.place < 0 else -1

    def woken(self, sequence: Sequence) -> None:
        """The tenant catches up with virtual time."""
        self._served[sequence.tenant] = max(self._now, self._time(sequence.tenant))
        if len(self._served) > MAX_TENANTS:
            self._served = {t: time for t, time in self._served.items() if time > self._now}
            self._mean_output = {t: self._mean_output.get(t, FIRST_GUESS) for t in self._served}

    def admitted(self, sequence: Sequence) -> None:
        """Charges what is to be computed, and a guess at the output."""
        tenant = sequence.tenant
        if sequence.place < 0:
            self._now = max(self._now, self._time(tenant))
        super().admitted(sequence)
        guess = self._mean_output.get(tenant, FIRST_GUESS)
        output = min(guess, sequence.max_tokens - len(sequence.output))
        self._charged[sequence] = output
        prompt = sequence.num_known - sequence.num_computed
        self._served[tenant] = self._time(tenant) + prompt + output

    def left(self, sequence: Sequence) -> None:
        """Corrects the guess, and learns from it."""
        tenant = sequence.tenant
        output = len(sequence.output) - sequence.num_generated
        self._served[tenant] = max(0, self._time(tenant) + output - self._charged.pop(sequence))
        mean = self._mean_output.get(tenant, FIRST_GUESS)
        self._mean_output[tenant] = mean + (output - mean) // 8

    def _time(self, tenant: str) -> int:
        return self._served.get(tenant, self._now)
