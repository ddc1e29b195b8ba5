"""One decision about all requests of a job: the prompts and choices of one HTTP request.

Its first request is decided upon when none of the others waits. So a job is admitted or refused by
what others have waiting, and never because of its own size.
"""

from collections import OrderedDict
from collections.abc import Callable

from pagewire.errors import RequestError

# Jobs of one gateway whose decisions are kept. A gateway sends the requests of a job one after the
# other, with few of other jobs in between.
MAX_JOBS = 4096

Refusal = RequestError | None


class JobAdmission:
    """What was decided about a job: once for its new requests, and once for those that moved."""

    __slots__ = ("_decided",)

    def __init__(self) -> None:
        self._decided: dict[bool, Refusal] = {}

    def refusal(self, moved: bool, decide: Callable[[], Refusal]) -> Refusal:
        """The error of a request of the job, or None; `decide` is called for the first one."""
        if moved not in self._decided:
            self._decided[moved] = decide()
        return self._decided[moved]


class JobAdmissions:
    """The jobs of one gateway's stream, by their numbers. The least recently used is forgotten."""

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
