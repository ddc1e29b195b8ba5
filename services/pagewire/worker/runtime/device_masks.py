"""Masks of constrained rows; the host waits for them."""

import numpy as np
import torch

from pagewire.worker.ops.contract.sampling import TokenMasks
from pagewire.worker.protocol.constraints.slot_masks import StepMasks
from pagewire.worker.runtime.upload import upload


def token_masks(step: StepMasks | None, rows: int, device: torch.device) -> TokenMasks | None:
    """Waits for the masks of a step with `rows` sampling rows; None if it has none."""
    if step is None:
        return None
    step.wait()  # the layers may still run on the device
    masks = step.words[step.slots]  # [n, words], a copy
    mask_rows = np.full(rows, -1, np.int32)
    mask_rows[step.rows] = np.arange(len(masks))
    by_row, words = upload(device, mask_rows, masks.ravel())
    return TokenMasks(by_row, words.view(masks.shape))
