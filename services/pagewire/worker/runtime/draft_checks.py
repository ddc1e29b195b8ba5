"""Verification of drafts: which rows of a step belong to the outputs, and their tokens."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.worker.ops import Ops
from pagewire.worker.protocol.steps.device_plan import NO_DRAFT, DevicePlan
from pagewire.worker.runtime.device_slots import DeviceSlots


def sample_with_drafts(
    slots: DeviceSlots, ops: Ops, logits: Tensor, hidden: Tensor, plan: DevicePlan
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Samples the rows of a plan with drafts, on the CPU.

    The first rows of all slots are sampled together, then the rows of those drafts that equal the
    tokens drawn before them, and so on. So each token is drawn with the penalties, the index and
    the last token that it would have without drafts.

    Args:
        slots: the state of the slots; it takes the tokens that belong to the outputs.
        ops: the operations.
        logits: `[rows, vocabulary]`.
        hidden: `[rows, hidden]`, the input of the head.
        plan: the plan.

    Returns:
        `[rows]` int32 tokens, and `[rows]` whether the row belongs to an output. A row without a
        token, as its `hidden` is not finite, belongs to one only if it is no draft.
    """
    assert plan.drafts is not None
    drafts = np.full(len(plan.sample_slots) + 1, NO_DRAFT, np.int32)
    drafts[: len(plan.drafts)] = plan.drafts
    finite = np.append(torch.isfinite(hidden).all(-1).numpy(), False)
    tokens = np.zeros(len(plan.sample_slots), np.int32)
    taken = np.zeros(len(plan.sample_slots), np.bool_)
    rows = np.flatnonzero(drafts[:-1] == NO_DRAFT)
    while len(rows):
        at = torch.from_numpy(rows)
        drawn = slots.sample(
            ops,
            logits[at],
            hidden[at],
            torch.from_numpy(plan.sample_slots[rows]),
            torch.from_numpy(plan.sample_indices[rows]),
            plan.filtered,
        ).numpy()
        tokens[rows], taken[rows] = drawn, True
        after = rows + 1
        right = (drafts[after] != NO_DRAFT) & (drafts[after] == drawn) & finite[after]
        rows = after[right]
    return torch.from_numpy(tokens), taken
