"""Parts of a snapshot: maps of blocks, outlines of prefix trees, tables of steps and requests."""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.kv.block_pool import BlockState
from pagewire.scheduler.core.kv.prefix_outline import NodeOutline
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.snapshots.step_log import StepRecord
from pagewire.v1 import snapshot_pb2 as pb

MAX_ID = 40  # characters

_STATES = len(BlockState)


def block_map(states: NDArray[np.uint8], max_cells: int) -> pb.BlockMap:
    """A map of at most `max_cells` cells; a cell has the state that most of its blocks have."""
    size = max(1, -(-len(states) // max_cells))
    cells = states
    if size > 1:
        # The padding of the last cell counts for no state.
        padded = np.full(-(-len(states) // size) * size, _STATES, dtype=np.uint8)
        padded[: len(states)] = states
        rows = padded.reshape(-1, size)
        counts = np.stack([(rows == state).sum(axis=1) for state in range(_STATES)])
        cells = counts.argmax(axis=0).astype(np.uint8)
    return pb.BlockMap(
        cells=cells.tobytes(),
        blocks_per_cell=size,
        counts=np.bincount(states, minlength=_STATES).tolist(),
    )


def prefix_outline(nodes: list[NodeOutline], num_nodes: int) -> pb.PrefixOutline:
    """The message of an outline."""
    return pb.PrefixOutline(
        parents=[node.parent + 1 for node in nodes],
        blocks=[node.blocks for node in nodes],
        on_device=[node.on_device for node in nodes],
        hits=[node.hits for node in nodes],
        holders=[node.holders for node in nodes],
        num_nodes=num_nodes,
    )


def step_table(
    records: Iterable[StepRecord], places: Mapping[WorkerBatch, int], last: int
) -> pb.StepTable:
    """The message of some steps; `places` are those of the workers, from 1."""
    steps = list(records)
    return pb.StepTable(
        last=last,
        workers=[places.get(step.batch, 0) for step in steps],
        ended=[step.ended for step in steps],
        durations=[step.duration_us for step in steps],
        decodes=[step.decodes for step in steps],
        prefills=[step.prefills for step in steps],
        copies=[step.copies for step in steps],
    )


class RequestRows:
    """Collects the rows of a request table."""

    def __init__(self) -> None:
        self.table = pb.RequestTable()

    def add_running(self, sequence: Sequence, batch: WorkerBatch, place: int) -> None:
        """Adds a sequence in a live slot of a worker."""
        slots, slot = batch.slots, sequence.slot
        decodes = sequence.state is State.DECODE
        phase = pb.REQUEST_PHASE_DECODE if decodes else pb.REQUEST_PHASE_PREFILL
        self._add(sequence, phase, place, int(slots.computed[slot]), int(slots.received[slot]))

    def add_waiting(self, sequence: Sequence) -> None:
        """Adds a sequence that waits for admission."""
        preempted = sequence.preempted
        phase = pb.REQUEST_PHASE_PREEMPTED if preempted else pb.REQUEST_PHASE_WAITING
        self._add(sequence, phase, 0, 0, len(sequence.output))

    def add_held(self, sequence: Sequence) -> None:
        """Adds a suspect that must not run yet."""
        self._add(sequence, pb.REQUEST_PHASE_HELD, 0, 0, len(sequence.output))

    def _add(
        self, sequence: Sequence, phase: pb.RequestPhase, place: int, computed: int, output: int
    ) -> None:
        table = self.table
        table.ids.append(sequence.owner.request_id[:MAX_ID])
        table.phases.append(phase)
        table.workers.append(place)
        table.prompt_tokens.append(len(sequence.prompt))
        table.computed_tokens.append(computed)
        table.output_tokens.append(output)
        table.max_tokens.append(sequence.max_tokens)
        table.cached_tokens.append(sequence.cached_tokens or 0)
