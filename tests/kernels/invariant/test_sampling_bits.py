"""Tokens and log probabilities of a row do not depend on the requests of other rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from pagewire.limits import MAX_LOGPROBS
from pagewire.worker.ops.contract.sampling import SamplingState
from pagewire.worker.ops.reference import sampling as reference
from pagewire.worker.ops.triton.invariant import ops, sampling
from pagewire.worker.ops.triton.logprobs import logprobs
from support.kernels.any_threads import any_threads
from support.kernels.comparison import CUDA

ROWS, VOCABULARY = 5, 2500


@pytest.fixture
def threads() -> Iterator[None]:
    """Sums have any order, as in two variants of a kernel."""
    with nullcontext() if CUDA else any_threads():
        yield


def state_of(rows: int, device: torch.device) -> SamplingState:
    """Rows at temperature 0.9 without filters; their seeds differ."""

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    return SamplingState(
        temperature=full(0.9),
        top_k=full(0, torch.int32),
        top_p=full(1),
        min_p=full(0),
        seed=torch.arange(rows, device=device) * 7919,
        index=full(3, torch.int32),
        min_tokens=full(0, torch.int32),
        stop_token_ids=torch.full((rows, 16), -1, dtype=torch.int32, device=device),
    )


def test_a_row_without_filters_draws_as_beside_rows_with_filters(threads, device):
    torch.manual_seed(2)
    logits = 4 * torch.randn(ROWS, VOCABULARY, device=device)
    plain = state_of(ROWS, device)
    top_k = plain.top_k.clone()
    top_k[1] = 5
    mixed = ops.sample(logits, replace(plain, top_k=top_k), filtered=True)
    alone = ops.sample(logits, plain, filtered=False)
    others = [0, 2, 3, 4]
    assert torch.equal(mixed[others], alone[others])
    assert torch.equal(alone, ops.sample(logits, plain, filtered=True))


def test_tokens_are_those_of_the_reference(device):
    torch.manual_seed(3)
    logits = 4 * torch.randn(64, 200, device=device)
    state = state_of(64, device)
    found, expected = ops.sample(logits, state), reference.sample(logits, state)
    # Masses of groups are rounded to multiples of 2^-20, which may decide a near tie.
    assert (found != expected).sum() <= 1


def test_log_probabilities_do_not_depend_on_how_many_a_step_wants(monkeypatch, device):
    torch.manual_seed(4)
    logits = 4 * torch.randn(ROWS, VOCABULARY, device=device)
    tokens = torch.arange(ROWS, dtype=torch.int32, device=device)
    widths = []

    def compute(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
        widths.append(k)
        return logprobs(logits, tokens, k)

    monkeypatch.setattr(sampling, "logprobs_of_width", compute)
    widest = ops.logprobs(logits, tokens, MAX_LOGPROBS)
    expected = reference.logprobs(logits, tokens, MAX_LOGPROBS)
    torch.testing.assert_close(widest[0], expected[0], rtol=0, atol=1e-5)
    assert torch.equal(widest[1], expected[1])
    for k in (0, 5):
        chosen, ids, top, ranks = ops.logprobs(logits, tokens, k)
        assert ids.shape == top.shape == (ROWS, k)
        assert ids.is_contiguous()
        assert top.is_contiguous()
        assert torch.equal(ids, widest[1][:, :k])
        assert torch.equal(ranks, widest[3])
        assert torch.equal(chosen, widest[0])
        assert torch.equal(top, widest[2][:, :k])
    assert set(widths) == {MAX_LOGPROBS}, "one kernel for all"
    with pytest.raises(ValueError, match="k is 21"):
        ops.logprobs(logits, tokens, 21)


def test_a_small_vocabulary_has_fewer_likeliest_tokens(device):
    logits = torch.randn(2, 12, device=device)
    tokens = torch.zeros(2, dtype=torch.int32, device=device)
    assert ops.logprobs(logits, tokens, 12)[1].shape == (2, 12)
