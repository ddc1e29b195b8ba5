"""Verification of drafts: which rows of a step belong to the outputs, and their tokens."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.worker.ops import Ops
from pagewire.worker.protocol.constraints.slot_masks import StepMasks
from pagewire.worker.protocol.steps.device_plan import NO_DRAFT, DevicePlan
from pagewire.worker.runtime.device_masks import token_masks
from pagewire.worker.runtime.device_slots import DeviceSlots

# Positions of sampling rows.
Rows = NDArray[np.intp]


def sample_with_drafts(
    slots: DeviceSlots, ops: Ops, logits: Tensor, hidden: Tensor, plan: DevicePlan
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Samples the rows of a plan with drafts, on the CPU.

    The first rows of all slots are sampled together. Then the rows of drafts that equal the tokens
    drawn before them are sampled, and so on. So each token is drawn with the same penalties, index
    and mask as without drafts.

    Args:
        slots: the state of the slots; it keeps the tokens that belong to the outputs.
        ops: the operations.
        logits: `[rows, vocabulary]`.
        hidden: `[rows, hidden]`, the input of the head.
        plan: the plan; its masks get the tokens that belong to the outputs.

    Returns:
        `[rows]` int32 tokens, and `[rows]` whether the row belongs to an output. A row has no token
        if its `hidden` is not finite; it belongs to an output only if it is not a draft.
    """
    assert plan.drafts is not None
    count = len(plan.sample_slots)
    drafts = np.full(count + 1, NO_DRAFT, np.int32)  # one more, as the last row has a next one
    drafts[: len(plan.drafts)] = plan.drafts
    finite = np.append(torch.isfinite(hidden).all(-1).numpy(), False)
    tokens, taken = np.zeros(count, np.int32), np.zeros(count, np.bool_)
    rows = np.flatnonzero(drafts[:-1] == NO_DRAFT)
    masks = plan.masks
    if masks is not None:
        masks.wait()  # a failure has the number of the step's row
        masks = replace(masks, rows=np.searchsorted(rows, masks.rows).astype(np.int32))
    while len(rows):
        drawn = slots.sample(
            ops,
            logits[torch.from_numpy(rows)],
            hidden[torch.from_numpy(rows)],
            torch.from_numpy(plan.sample_slots[rows]),
            torch.from_numpy(plan.sample_indices[rows]),
            plan.filtered,
            token_masks(masks, len(rows), logits.device),
        ).numpy()
        tokens[rows], taken[rows] = drawn, True
        if masks is not None:
            masks.advance(drawn)
        after = rows + 1
        rows = after[(drafts[after] != NO_DRAFT) & (drafts[after] == drawn) & finite[after]]
        if masks is not None:
            rows, masks = _await_masks(plan, masks, rows)
    return torch.from_numpy(tokens), taken


def _await_masks(plan: DevicePlan, before: StepMasks, rows: Rows) -> tuple[Rows, StepMasks | None]:
    """The `rows [n]` that can be sampled next, and their masks; None if no row is constrained.

    If a grammar has failed, its row has no mask. It is left out; the next step fails it.
    """
    while True:
        constrained = np.flatnonzero(np.isin(plan.sample_slots[rows], before.slots))
        if not len(constrained):
            return rows, None
        at = rows[constrained]
        masks = before.owner.of_step(
            constrained.astype(np.int32), plan.sample_slots[at], plan.sample_indices[at]
        )
        masks.wait()
        if not masks.failures:
            return rows, masks
        rows = np.delete(rows, [failure.row for failure in masks.failures])
