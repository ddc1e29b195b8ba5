"""Masks of constrained rows; the host waits for them."""

import numpy as np
from torch import Tensor

from pagewire.worker.ops import Ops
from pagewire.worker.protocol.constraints.slot_masks import StepMasks
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.runtime.upload import upload


def apply_masks(ops: Ops, logits: Tensor, plan: DevicePlan) -> Tensor:
    """Waits for the masks, then masks the constrained rows of `logits [rows, vocabulary]` in place.

    Returns the unmasked logits for log probabilities: a copy if the plan needs any.
    """
    if plan.masks is None:
        return logits
    plan.masks.wait()  # the layers may still run on the device
    unmasked = logits if plan.logprobs is None else logits.clone()
    mask_rows_of(ops, logits, plan.masks)
    return unmasked


def mask_rows_of(ops: Ops, logits: Tensor, step: StepMasks) -> None:
    """Masks the rows of `logits [rows, vocabulary]` in place; the masks must be known."""
    masks = step.words[step.slots]  # [n, words]
    mask_rows = np.full(len(logits), -1, np.int32)
    mask_rows[step.rows] = np.arange(len(masks))
    rows, words = upload(logits.device, mask_rows, masks.ravel())
    ops.mask_logits(logits, rows, words.view(masks.shape))
