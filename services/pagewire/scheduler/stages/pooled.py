"""Vectors of a worker's step: each ends its request."""

import numpy as np

from pagewire.packing import Float32Array, pack_floats, unpack, unpack_floats
from pagewire.scheduler.core.batching.step_plan import StepOutcome
from pagewire.scheduler.core.pooling import ModelPooling
from pagewire.scheduler.core.sequence import State
from pagewire.scheduler.stages.endings import Endings
from pagewire.scheduler.workers.ready_workers import ReadyWorker
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb


def read_vectors(result: worker_pb.StepResult, size: int) -> Float32Array:
    """The vectors `[rows, size]` of a result; those of failed rows are 0.

    ValueError unless the result has one vector of `size` numbers for each row that did not fail.
    """
    sound = unpack(result.token_ids) >= 0
    found, count = unpack_floats(result.pooled), int(np.count_nonzero(sound))
    if len(found) != size * count:
        raise ValueError(
            f"step {result.step} has {len(found)} numbers for {count} vectors of {size}"
        )
    vectors = np.zeros((len(sound), size), np.float32)
    vectors[sound] = found.reshape(-1, size)
    return vectors


def deliver_vectors(
    worker: ReadyWorker,
    pooling: ModelPooling,
    outcome: StepOutcome,
    vectors: Float32Array,
    endings: Endings,
) -> None:
    """Delivers the vector of each row of `outcome` to its client.

    `vectors [rows of the answer, size]` are those of the result.
    """
    if outcome.valid is not None:
        vectors = vectors[outcome.valid]
    for slot, vector in zip(outcome.slots.tolist(), vectors, strict=True):
        request = worker.streams.owner(slot)
        sequence = worker.batch.finish(slot, State.COMPLETED)
        del sequence.output[:]  # the token only marks that the prompt is computed
        finish = pb.Finish(
            reason=pb.FINISH_REASON_STOP,
            pooled=pack_floats(pooling.result(vector, request.dimensions)),
        )
        endings.close(request, State.COMPLETED, finish)
