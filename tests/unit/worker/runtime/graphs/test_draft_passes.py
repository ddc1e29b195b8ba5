"""Passes of draft models and heads: the drafts that they keep, and their indices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagewire.worker.ops.contract.drafts import (
    MODEL,
    PREDICTION,
    SUFFIX,
    LocatedRows,
    TokenHistory,
)
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_drafts import token_history
from pagewire.worker.runtime.graphs import draft_passes
from pagewire.worker.runtime.graphs.draft_passes import ModelPasses, keep_drafts
from pagewire.worker.runtime.graphs.eagle_passes import EaglePasses

LIMITS = Limits(
    vocab_size=100,
    num_slots=4,
    block_size=8,
    num_blocks=8,
    max_model_len=64,
    max_num_batched_tokens=64,
    max_drafts=3,
    drafts_on_device=True,
    draft_model=True,
)
PADDING = LIMITS.padding_slot


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def history() -> TokenHistory:
    return token_history(LIMITS, torch.device("cpu"))


def rows(*slots: int) -> LocatedRows:
    lengths = ints(*(0 if slot == PADDING else 5 for slot in slots))
    return LocatedRows(ints(*slots), lengths, lengths, lengths)


def test_a_model_drafts_where_no_other_drafter_has(history: TokenHistory) -> None:
    history.drafts[1], history.num_drafts[1] = ints(7, 8, 9), 3
    history.drafts[2, :2], history.num_drafts[2], history.drafters[2] = ints(5, 6), 2, PREDICTION
    for place, drawn in enumerate((ints(40, 41, 42, 43), ints(50, 51, 52, 53), ints(*[60] * 4))):
        given = rows(0, 1, 2, PADDING)
        keep_drafts(history, given, torch.full_like(drawn, place), drawn)
    assert history.drafts[:3].tolist() == [[40, 50, 60], [7, 8, 9], [5, 6, 0]]
    assert history.num_drafts.tolist() == [3, 3, 2, 0, 0]
    assert history.drafters[:3].tolist() == [MODEL, SUFFIX, PREDICTION]


def test_a_pass_that_has_skipped_a_place_drafts_nothing(history: TokenHistory) -> None:
    keep_drafts(history, rows(0), ints(1), ints(40))
    assert history.num_drafts[0] == 0


def test_passes_need_no_values_of_kernels(
    history: TokenHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While kernels are collected, none runs, and torch's operations read unwritten memory."""
    undefined = 1 << 30

    def located(count: int) -> LocatedRows:
        given = torch.full((count,), undefined, dtype=torch.int32)
        return LocatedRows(given, given, given, given)

    def begin(inputs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, LocatedRows]:
        count = inputs.shape[1]
        return torch.zeros(count, 8), located(count)

    ops = SimpleNamespace(
        begin_drafted=begin,
        gather_sampling=lambda *_: None,
        sample=lambda logits, *_: torch.full((len(logits),), undefined, dtype=torch.int32),
    )
    decoder: Any = SimpleNamespace(
        ops=ops,
        weights=SimpleNamespace(embedding=torch.zeros(100, 8)),
        config=SimpleNamespace(vocab_size=100),
        layers=lambda residual, *_: residual,
        body=lambda residual, *_: residual,
        logits=lambda hidden, out: out,
        finish_last_layer=lambda residual, *_: residual,
    )
    slots: Any = SimpleNamespace(history=history, block_tables=None, sampling=None)
    monkeypatch.setattr(draft_passes, "Staging", lambda _: None)
    cache: Any = None
    passes = ModelPasses(decoder, cache, slots, LIMITS, [1, 2, 4])
    assert len([run() for run in passes.runs()]) == 9
    assert history.num_drafts.tolist() == [0] * 5
    head: Any = SimpleNamespace(
        decoder=decoder,
        config=SimpleNamespace(hidden_size=8),
        inputs=(0, 0, 0),
        vocab_size=100,
        fused=lambda states: states[:, 0],
        pairs=lambda tokens, states: torch.cat((torch.zeros(100, 8)[tokens], states), 1),
        logits=decoder.logits,
    )
    of_head = EaglePasses(head, cache, slots, LIMITS, [1, 2, 4], [1, 2, 4, 8, 16])
    of_head.after_head(located(16), torch.arange(16))
    of_head._results.fill_(undefined)
    assert len([run() for run in of_head.runs()]) == 12 + 5
    assert history.num_drafts.tolist() == [0] * 5
