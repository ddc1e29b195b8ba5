"""Log probabilities: computed on the device, read on the host."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.limits import MAX_LOGPROBS
from pagewire.worker.model.decoder import Decoder, Prefill
from pagewire.worker.model.kv_cache import KVCache
from pagewire.worker.ops import Ops
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows, Logprobs
from pagewire.worker.protocol.steps.prompt_rows import PromptLogprobs, PromptRows
from pagewire.worker.runtime.upload import upload

# Numbers of likeliest tokens that are computed. Each is a kernel variant that the warm-up compiles.
WIDTHS = (0, 5, MAX_LOGPROBS)
# Logits of prompt tokens that exist at once: 64 MiB as float32. A prompt may have a thousand times
# as many.
MAX_PROMPT_LOGITS = 1 << 24
# Logits are computed for a multiple of this many rows: then slices of tensors stay aligned to 16
# bytes, for which the kernels are compiled.
ROW_MULTIPLE = 16


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


@dataclass(frozen=True, slots=True)
class PendingPromptLogprobs:
    """Log probabilities of prompt tokens whose copy to the host may be in flight."""

    rows: PromptRows
    # [rows, 2 + 2 * width] int32: the rank, then as in `PendingLogprobs`.
    packed: Tensor

    def read(self) -> PromptLogprobs:
        """The values; only after the step is done."""
        packed, top = self.packed.numpy(), self.rows.num_top
        width = packed.shape[1] // 2 - 1
        floats = packed.view(np.float32)
        return PromptLogprobs(
            rows=self.rows,
            chosen=floats[:, 1],
            ranks=packed[:, 0],
            top_ids=packed[:, 2 : 2 + top],
            top=floats[:, 2 + width : 2 + width + top],
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
    chosen, ids, top, _ = ops.logprobs(
        logits[indices], tokens[indices].clamp_(min=0), min(width, logits.shape[1])
    )
    return torch.cat((chosen[:, None].view(torch.int32), ids, top.view(torch.int32)), dim=1)


def prompt_rows_at_once(vocabulary: int) -> int:
    """The most prompt tokens whose logits exist at once."""
    return max(ROW_MULTIPLE, MAX_PROMPT_LOGITS // vocabulary // ROW_MULTIPLE * ROW_MULTIPLE)


def compute_prompt_logprobs(
    decoder: Decoder,
    residual: Tensor,
    queries: Tensor,
    cache: KVCache,
    block_tables: Tensor,
    rows: PromptRows,
    first_row: int,
) -> Tensor:
    """Runs the last layer and the head, a few rows at a time; packed as `PendingPromptLogprobs`.

    Args:
        decoder: the model.
        residual: `[tokens, hidden]`, as `Decoder.body` left it; it stays unchanged.
        queries: `[tokens, heads, head_dim]`, the result of `Decoder.body`.
        cache, block_tables: as in `Decoder.body`.
        rows: the rows to compute.
        first_row: the row of the step's first chunk token; rows before it decode.
    """
    indices, slots, starts, lengths, targets = upload(
        residual.device,
        rows.rows + np.int32(first_row),
        rows.slots,
        rows.starts,
        rows.lengths,
        rows.targets,
    )
    chunks = Prefill(slots, starts, lengths, int(rows.counts.max()))
    attended = decoder.last_attention(queries[indices], chunks, cache, block_tables)
    vocabulary = decoder.config.vocab_size
    width = min(next(w for w in WIDTHS if w >= rows.num_top), vocabulary)
    size = prompt_rows_at_once(vocabulary)
    pieces = []
    for at in range(0, len(indices), size):
        piece = slice(at, at + size)
        hidden = decoder.after_last_attention(attended[piece], residual[indices[piece]])
        logits = decoder.logits(hidden)
        chosen, ids, top, ranks = decoder.ops.logprobs(logits, targets[piece], width)
        values = (chosen[:, None].view(torch.int32), ids, top.view(torch.int32))
        pieces.append(torch.cat((ranks[:, None], *values), dim=1))
    return torch.cat(pieces)
