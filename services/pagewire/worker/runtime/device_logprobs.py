"""Log probabilities: computed on the device, read on the host."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.limits import MAX_LOGPROBS
from pagewire.worker.ops import Ops
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows, Logprobs
from pagewire.worker.runtime.upload import upload

# Numbers of likeliest tokens that are computed. Each is a kernel variant that the warm-up compiles.
WIDTHS = (0, 5, MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log probabilities whose copy to the host may be in flight."""

    rows: LogprobRows
    # [n, 1 + 2 * width] int32: the bits of the token's log probability, `width` token ids, the bits
    # of their log probabilities. One tensor needs one copy.
    packed: Tensor

    def read(self) -> Logprobs:
        """The values; only after the step is done."""
        packed, top = self.packed.numpy(), self.rows.num_top
        width = packed.shape[1] // 2
        floats = packed.view(np.float32)
        return Logprobs(
            rows=self.rows.rows,
            chosen=floats[:, 0],
            top_ids=packed[:, 1 : 1 + top],
            top=floats[:, 1 + width : 1 + width + top],
        )


def compute_logprobs(ops: Ops, logits: Tensor, tokens: Tensor, rows: LogprobRows) -> Tensor:
    """Log probabilities on the device, packed as in `PendingLogprobs`: `[n, 1 + 2 * width]` int32.

    Args:
        ops: the operations.
        logits: `[all rows, vocabulary]`.
        tokens: `[all rows]` int32; -1 is allowed for a failed row.
        rows: the `n` rows to compute, and the number of likeliest tokens.
    """
    (indices,) = upload(logits.device, rows.rows)
    width = next(w for w in WIDTHS if w >= rows.num_top)
    chosen, ids, top = ops.logprobs(
        logits[indices], tokens[indices].clamp_(min=0), min(width, logits.shape[1])
    )
    return torch.cat((chosen[:, None].view(torch.int32), ids, top.view(torch.int32)), dim=1)
