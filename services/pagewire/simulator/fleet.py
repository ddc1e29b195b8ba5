"""Several schedulers replay one trace, each on workers of its own.

A gateway's rule chooses the scheduler of each request. Unlike in a gateway, the rule has the exact
number of open requests of each scheduler at once.
"""

import heapq
from dataclasses import dataclass

from pagewire.gateway.affinity import HEAD_TOKENS
from pagewire.gateway.routing.selection import choose
from pagewire.simulator.recording import Recording
from pagewire.simulator.replay import Replay
from pagewire.simulator.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class SimulatedScheduler:
    """A scheduler, with the values that the gateway's rule reads."""

    target: str
    replay: Replay

    @property
    def num_requests(self) -> int:
        """Its open requests."""
        return self.replay.num_open

    @property
    def num_workers(self) -> int:
        """Its workers."""
        return self.replay.num_workers

    @property
    def pressure(self) -> float:
        """Requests for each worker."""
        return self.num_requests / self.num_workers


def run_fleet(replays: list[Replay], requests: list[TraceRequest]) -> Recording:
    """Replays requests, in order of arrival, until the last has ended."""
    schedulers = [SimulatedScheduler(f"scheduler-{n}", r) for n, r in enumerate(replays)]
    for replay in replays:
        replay.start(max((request.number for request in requests), default=0))
    arrivals = iter(requests)
    coming = next(arrivals, None)
    # The schedulers by the end of their next step; an entry is outdated after an arrival.
    ends: list[tuple[float, int]] = []
    now = 0.0
    while coming is not None or ends:
        if coming is not None and (not ends or coming.arrival <= ends[0][0]):
            now = coming.arrival
            chosen = choose(schedulers, _head(coming))
            assert chosen is not None
            number = schedulers.index(chosen)
            replays[number].turn(now, [coming])
            coming = next(arrivals, None)
        else:
            now, number = heapq.heappop(ends)
            if replays[number].next_end > now:
                continue  # an arrival has already done this turn
            replays[number].turn(now, ())
        if replays[number].num_open:
            heapq.heappush(ends, (replays[number].next_end, number))
    return Recording.of_all([replay.end(now) for replay in replays])


def _head(request: TraceRequest) -> bytes:
    """A stand-in for the first tokens of a prompt; empty if it is too short for a preference."""
    if request.input_length < HEAD_TOKENS:
        return b""
    first = request.number if request.hash_ids is None else request.hash_ids[0]
    return b"%d" % first
