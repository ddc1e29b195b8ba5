"""One decision about all requests of a job: the prompts and choices of one HTTP request.

The decision is made for its first request, when none of the others waits. So it depends on the
waiting requests of other jobs, and never on the job's own size.
"""

from collections import OrderedDict
from collections.abc import Callable

from pagewire.errors import RequestError

# Jobs of one gateway whose decisions are kept. A gateway sends the requests of a job one after the
# other, with few requests of other jobs in between.
MAX_JOBS = 4096

Refusal = RequestError | None


class JobAdmission:
    """The decisions about a job: one for its new requests, and one for those that moved."""

    __slots__ = ("_decided",)

    def __init__(self) -> None:
        self._decided: dict[bool, Refusal] = {}

    def refusal(self, moved: bool, decide: Callable[[], Refusal]) -> Refusal:
        """The error of a request of the job, or None; `decide` is called for the first one."""
        if moved not in self._decided:
            self._decided[moved] = decide()
        return self._decided[moved]


class JobAdmissions:
    """The jobs of one gateway's stream, by number. The least recently used one is dropped."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[int, JobAdmission] = OrderedDict()

    def of(self, number: int) -> JobAdmission | None:
        """The job of a number; None for 0, a request that is alone."""
        if not number:
            return None
        job = self._jobs.setdefault(number, JobAdmission())
        self._jobs.move_to_end(number)
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        return job
