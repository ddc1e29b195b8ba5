"""Rows of captured steps on a worker whose device drafts: their inputs and their results."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.ops.contract.drafts import COUNTS, DRAFTED, DRAFTERS, RIGHT, TOKENS
from pagewire.worker.ops.contract.step import FAILED
from pagewire.worker.protocol.backend import Outcome, RowFailure, non_finite
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.draft_rows import first_rows, places_of
from pagewire.worker.runtime.eager import EagerHandle

# The drafters of worker.proto, indexed by SUFFIX, PREDICTION, MODEL and RECENT of
# `ops.contract.drafts`.
DRAFTER = np.array(
    [pb.DRAFTER_SUFFIX, pb.DRAFTER_PREDICTION, pb.DRAFTER_DRAFT_MODEL, pb.DRAFTER_RECENT], np.int32
)


@dataclass(frozen=True, slots=True)
class DraftedHandle(EagerHandle):
    """A submitted step on a device that drafts. It reads the results `[5, rows or more]`."""

    plan: DevicePlan | None = None


def places(plan: DevicePlan) -> Int32Array:
    """The place of each sampling row among the rows of its sequence, `[rows]`."""
    if plan.drafts is None:
        return np.zeros(len(plan.sample_slots), np.int32)
    firsts = first_rows(plan)
    return places_of(np.diff(firsts, append=len(plan.sample_slots)).astype(np.int32))


def offsets(plan: DevicePlan) -> Int32Array:
    """The index of each sampling row's token in the output, minus the row's position, `[rows]`."""
    return plan.sample_indices - plan.sample_lengths() + np.int32(1)


def outcome(handle: DraftedHandle) -> Outcome:
    """The result of a step that is done."""
    plan = handle.plan
    assert plan is not None
    rows = len(plan.sample_slots)
    results = handle.read()[:, :rows]
    firsts = first_rows(plan)
    tokens = results[TOKENS]
    failures = tuple(
        RowFailure(int(row), non_finite(int(plan.sample_indices[row])), retryable=False)
        for row in firsts[tokens[firsts] == FAILED]
    )
    taken: NDArray[np.bool_] | None = None
    drafted: Int32Array | None = None
    drafters: Int32Array | None = None
    tokens = np.maximum(tokens, np.int32(-1))  # ended sequences have no token either
    if plan.drafts is not None:
        counts = np.diff(firsts, append=rows)
        taken = places(plan) < np.repeat(results[COUNTS, firsts], counts)
        drafted = results[DRAFTED, firsts]
        drafters = DRAFTER[results[DRAFTERS, firsts]]
        if plan.masks is not None:
            plan.masks.advance(tokens)
    return Outcome(
        tokens,
        failures,
        duration_us=int(handle.timer.wait() * 1e6),
        logprobs=None if handle.logprobs is None else handle.logprobs.read(),
        prompt_logprobs=None if handle.prompt_logprobs is None else handle.prompt_logprobs.read(),
        taken=taken,
        right=results[RIGHT, firsts].astype(np.bool_),
        drafted=drafted,
        drafters=drafters,
    )
