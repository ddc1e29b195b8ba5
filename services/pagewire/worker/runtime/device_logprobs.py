"""Log probabilities on the device, and their way to the host."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.limits import MAX_LOGPROBS
from pagewire.worker.ops import Ops
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows, Logprobs
from pagewire.worker.runtime.upload import upload

# Numbers of likeliest tokens that are computed: a kernel variant each, compiled before serving.
WIDTHS = (0, 5, MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log probabilities on their way to the host; all as int32 bits, so that they travel as one."""

    wanted: LogprobRows
    packed: Tensor  # [n, 1 + 2 * width]: the token's, then ids, then theirs

    def read(self) -> Logprobs:
        """What has arrived; only once the step is done."""
        packed, top = self.packed.numpy(), self.wanted.num_top
        width = packed.shape[1] // 2
        floats = packed.view(np.float32)
        return Logprobs(
            rows=self.wanted.rows,
            chosen=floats[:, 0],
            top_ids=packed[:, 1 : 1 + top],
            top=floats[:, 1 + width : 1 + width + top],
        )


def compute(ops: Ops, logits: Tensor, tokens: Tensor, wanted: LogprobRows) -> Tensor:
    """The packed log probabilities `[n, 1 + 2 * width]` int32 of some rows, on their device.

    Args:
        ops: the operations.
        logits: `[rows, vocabulary]`.
        tokens: `[rows]` int32; that of a failed row may be -1.
        wanted: the rows, and how many likeliest tokens.
    """
    (rows,) = upload(logits.device, wanted.rows)
    width = next(w for w in WIDTHS if w >= wanted.num_top)
    chosen, ids, top = ops.logprobs(
        logits[rows], tokens[rows].clamp_(min=0), min(width, logits.shape[1])
    )
    return torch.cat((chosen[:, None].view(torch.int32), ids, top.view(torch.int32)), dim=1)
