"""A snapshot of the scheduler, made in pieces so that other work continues in between."""

import asyncio
from itertools import islice

from pagewire.scheduler import metrics
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.snapshots.maps import RequestRows, block_map, prefix_outline, step_table
from pagewire.scheduler.snapshots.step_log import StepLog
from pagewire.scheduler.workers.ready_workers import ReadyWorker, ReadyWorkers
from pagewire.v1 import snapshot_pb2 as pb

MAX_WORKERS = 64
# Of all workers together, and of each.
MAX_CELLS, MAX_CELLS_A_MAP = 8192, 1024
MAX_NODES, MIN_NODES_A_TREE = 256, 8
MAX_RUNNING = MAX_WAITING = 64


class Snapshots:
    """Reads the state of an engine. The engine notes its steps in `steps`."""

    def __init__(self, instance_id: str, workers: ReadyWorkers, admission: Admission) -> None:
        self.steps = StepLog()
        self._instance_id = instance_id
        self._workers = workers
        self._admission = admission

    async def take(self, steps_after: int) -> pb.Snapshot:
        """The state now. Other work may run after each worker."""
        shown = list(islice(self._workers, MAX_WORKERS))
        snapshot = pb.Snapshot(
            instance_id=self._instance_id,
            num_workers=len(self._workers.by_link),
            output_tokens=metrics.total(metrics.OUTPUT_TOKENS),
            prompt_tokens=metrics.total(metrics.PROMPT_TOKENS),
            cached_tokens=metrics.total(metrics.CACHED_TOKENS),
        )
        for worker in shown:
            snapshot.workers.append(_worker(worker, len(shown)))
            await asyncio.sleep(0)
        places = {worker.batch: place for place, worker in enumerate(shown, 1)}
        snapshot.requests.CopyFrom(self._requests(places))
        await asyncio.sleep(0)
        steps = self.steps
        snapshot.steps.CopyFrom(step_table(steps.after(steps_after), places, steps.last))
        snapshot.now = steps.clock()
        return snapshot

    def _requests(self, places: dict[WorkerBatch, int]) -> pb.RequestTable:
        rows = RequestRows()
        left = MAX_RUNNING
        for batch, place in places.items():
            # Each worker shows at least one, however many run on others.
            for sequence in islice(batch.running(), max(1, left)):
                rows.add_running(sequence, batch, place)
                left -= 1
        for sequence in self._admission.held[:MAX_WAITING]:
            rows.add_held(sequence)
        for sequence in self._admission.waiting.some(MAX_WAITING):
            rows.add_waiting(sequence)
        return rows.table


def _worker(worker: ReadyWorker, num_shown: int) -> pb.WorkerSnapshot:
    batch, pool = worker.batch, worker.batch.pool
    cells = min(MAX_CELLS_A_MAP, MAX_CELLS // num_shown)
    has_host = pool.host.memory.num_blocks > 0
    nodes = pool.outline(max(MIN_NODES_A_TREE, MAX_NODES // num_shown))
    return pb.WorkerSnapshot(
        address=worker.link.address,
        device=worker.info.device,
        dtype=worker.info.dtype,
        draining=worker.draining,
        num_slots=batch.limits.num_slots,
        num_running=batch.num_running,
        block_size=pool.block_size,
        device_blocks=block_map(pool.states(), cells),
        host_blocks=block_map(pool.host_states(), cells) if has_host else None,
        tree=prefix_outline(nodes, pool.num_nodes),
    )
