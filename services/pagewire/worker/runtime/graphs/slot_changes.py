"""A graph that stores the starts of sequences and the block table writes of a step.

Torch's nine indexed copies took the host 1 ms in a step with a start: longer than many steps take.
"""

import numpy as np
import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.step import START_VALUES, TABLE_VALUES
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.runtime.device_slots import DeviceSlots, pack_starts, pack_writes
from pagewire.worker.runtime.graphs.captures import Captures, Graph
from pagewire.worker.runtime.graphs.staging import Staging

# Starts and writes of one launch. A step with more of them needs several.
STARTS, WRITES = 32, 1024


class SlotChanges:
    """The graph, for the slots of one backend."""

    def __init__(self, ops: Ops, slots: DeviceSlots, device: torch.device) -> None:
        self._ops = ops
        self._slots = slots
        size = STARTS * START_VALUES + WRITES * TABLE_VALUES
        self._staging = Staging(size)
        self._inputs = torch.full((size,), -1, dtype=torch.int32, device=device)
        self._graph: Graph

    def run(self) -> Tensor:
        """Stores the starts and the writes of the inputs; the block tables."""
        starts, writes = self._inputs.split((STARTS * START_VALUES, WRITES * TABLE_VALUES))
        self._ops.start_slots(starts.view(STARTS, START_VALUES), self._slots.sampling)
        self._ops.write_tables(writes.view(WRITES, TABLE_VALUES), self._slots.block_tables)
        return self._slots.block_tables

    def capture(self, captures: Captures) -> None:
        """Captures the graph."""
        self._graph, _ = captures.whole(self.run)

    def launch(self, plan: DevicePlan) -> None:
        """Queues the changes of a plan."""
        starts, writes = pack_starts(plan.starts), pack_writes(plan.writes)
        while len(starts) or len(writes):
            packed = (_padded(starts[:STARTS], STARTS), _padded(writes[:WRITES], WRITES))
            self._staging.copy_to(self._inputs, np.concatenate(packed))
            self._graph.replay()
            starts, writes = starts[STARTS:], writes[WRITES:]


def _padded(rows: Int32Array, count: int) -> Int32Array:
    """The values of `rows [at most count, values]`, then those of skipped rows."""
    padded = np.full((count, rows.shape[1]), -1, np.int32)
    padded[: len(rows)] = rows
    return padded.ravel()
