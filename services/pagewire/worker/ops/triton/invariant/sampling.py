"""Tokens and log probabilities that do not depend on the options of other rows of a step."""

from __future__ import annotations

from torch import Tensor

from pagewire.limits import MAX_LOGPROBS
from pagewire.worker.ops.contract.sampling import SamplingState
from pagewire.worker.ops.triton.logprobs import logprobs as logprobs_of_width
from pagewire.worker.ops.triton.sampling import sample as sample_of_variant


def sample(logits: Tensor, state: SamplingState, filtered: bool = True) -> Tensor:
    """Implement `SamplingOps.sample`.

    If no row has filters, another variant of the kernel draws the tokens. Both variants return the
    same bits: the sum over a group is exact, and no operations are fused.
    """
    return sample_of_variant(logits, state, filtered, exact=True)


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implement `SamplingOps.logprobs`, always by the kernels of the largest `k`.

    A step computes all rows with the largest `k` of any row. Each `k` has its own kernel, which may
    add the weights of a chunk in another order.
    """
    if not 0 <= k <= MAX_LOGPROBS:
        raise ValueError(f"k is {k}: choose 0 to {MAX_LOGPROBS} log probabilities a token")
    widest = min(MAX_LOGPROBS, logits.shape[1])
    chosen, ids, top, ranks = logprobs_of_width(logits, tokens, widest)
    return chosen, ids[:, :k].contiguous(), top[:, :k].contiguous(), ranks
