"""Metrics of the present state, read when they are asked for, which costs a step nothing.

They are asked for on a thread of their own: what they call must allow that.
"""

from functools import partial

from pagewire.scheduler import metrics
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.sequence import State
from pagewire.scheduler.open_requests import OpenRequests
from pagewire.scheduler.ready_workers import ReadyWorkers


def publish(requests: OpenRequests, workers: ReadyWorkers, admission: Admission) -> None:
    """Lets metrics read the state of an engine."""
    for state in (State.PENDING, State.PREFILL, State.DECODE):
        gauge = metrics.OPEN_REQUESTS.labels(state.name.lower())
        gauge.set_function(partial(requests.in_state, state))
    metrics.BLOCKS.labels("used").set_function(
        lambda: sum(batch.pool.used for batch in workers.batches())
    )
    metrics.BLOCKS.labels("total").set_function(
        lambda: sum(batch.pool.total for batch in workers.batches())
    )
    metrics.HOST_BLOCKS.labels("used").set_function(
        lambda: sum(batch.pool.host.used for batch in workers.batches())
    )
    metrics.HOST_BLOCKS.labels("total").set_function(
        lambda: sum(batch.pool.host.memory.num_blocks for batch in workers.batches())
    )
    metrics.KV_WASTE.set_function(partial(_kv_waste, workers))
    metrics.READY_WORKERS.set_function(lambda: len(admission.workers))


def _kv_waste(workers: ReadyWorkers) -> float:
    batches = workers.batches()
    places = sum(batch.pool.used * batch.limits.block_size for batch in batches)
    return sum(batch.unused_places for batch in batches) / max(1, places)
