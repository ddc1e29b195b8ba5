"""EAGLE-3 heads on the graph backend: its code on a CPU, with torch's operations.

`test_device_draft_model.py` has the tests that draft models and heads share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagewire.v1 import worker_pb2 as pb
from support.device_drafts import drafting
from support.drafted_sequences import check_same
from support.eagle_drafts import backend_of, check_drafts, four_drafts
from support.eagle_heads import (
    BIGRAM_VOCAB,
    NEVER_DRAFTED,
    ReferenceHead,
    save_bigram_head,
    save_bigrams,
    save_head,
)
from support.models.copied_start import BLOCK_SIZE, run_copied_start
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, save_model

DRAFTER = pb.DRAFTER_DRAFT_MODEL
GREEDY = pb.SlotSampling(top_p=1)
INPUTS = (0, 1, 2)  # of models of three layers


def eagle(monkeypatch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> Any:
    """A worker whose graphs draft with the head in `folder`, as often as they can."""
    defaults = {"num_blocks": 512, "max_model_len": 512, "worker_max_num_batched_tokens": 128}
    given = {"speculate": "eagle", "draft_model": str(folder / "head")}
    return local_worker(folder / "model", drafting(monkeypatch), **defaults | given | settings)


@pytest.mark.parametrize("variant", ["llama", "granite", "gemma2", "mistral-window", "deepseek-v3"])
async def test_drafts_are_those_of_the_definition(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all kinds of targets: after prompts in chunks, and after wrong drafts."""
    target = save_model(tmp_path / "model", variant)
    head = save_head(
        tmp_path / "head", tmp_path / "model", 150, eagle_aux_hidden_state_layer_ids=INPUTS
    )
    reference = ReferenceHead(head, target, INPUTS)
    await check(monkeypatch, tmp_path, reference, vocabulary=VOCAB)


async def test_drafts_behind_right_ones_are_those_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bigrams(tmp_path / "model")
    head = save_bigram_head(tmp_path / "head", tmp_path / "model")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    reference = ReferenceHead(head, target, (2, 3, 3))
    await check(monkeypatch, tmp_path, reference, vocabulary=BIGRAM_VOCAB, right=10)


async def check(
    monkeypatch: pytest.MonkeyPatch, folder: Path, reference: ReferenceHead, **wanted: int
) -> None:
    four_drafts(monkeypatch)
    async with eagle(monkeypatch, folder) as worker:
        await check_drafts(worker, reference, **wanted)


@pytest.mark.parametrize(
    "way",
    [
        GREEDY,
        pb.SlotSampling(top_p=1, temperature=1, seed=4),
        pb.SlotSampling(top_p=0.9, temperature=1, seed=4),
    ],
    ids=["greedy", "sampled", "filtered"],
)
async def test_a_head_that_knows_its_model_is_right(
    tmp_path: Path, way: pb.SlotSampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bigrams(tmp_path / "model")
    save_bigram_head(tmp_path / "head", tmp_path / "model")

    def prompts() -> list[Sequence]:
        starts = (3, 17, 33)
        return [Sequence([9, at], BIGRAM_VOCAB - 10, sampling=way) for at in starts]

    async with local_worker(tmp_path / "model") as plain:
        want = prompts()
        await StepDriver(plain.stream(), plain.limits).run(want)
    async with eagle(monkeypatch, tmp_path) as worker:
        got = prompts()
        driver = StepDriver(worker.stream(), worker.limits)
        await driver.run(got, run_ahead=2)
        assert worker.fatal == []
        counted = worker.engine.metrics.drafts.value("draft_model", "accepted")
        assert counted == driver.accepted[DRAFTER]
    check_same(got, want)
    drawn = sum(sequence.output.count(NEVER_DRAFTED) for sequence in got)
    assert drawn >= 2
    assert driver.drafts[DRAFTER] > 90
    if way is GREEDY:
        # The drafts at the token that is in no draft are wrong, and so are those after them.
        lost = driver.drafts[DRAFTER] - driver.accepted[DRAFTER]
        assert drawn <= lost <= drawn * worker.limits.max_drafts
    else:
        assert driver.accepted[DRAFTER] > 0.5 * driver.drafts[DRAFTER]
    assert driver.number < 40


async def test_a_sequence_behind_a_cached_prefix_drafts_with_its_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares a block of another sequence, and starts with a copy of its next one."""
    save_model(tmp_path / "model", "llama")
    save_head(tmp_path / "head", tmp_path / "model", 150, eagle_aux_hidden_state_layer_ids=INPUTS)
    ours = [i * i % VOCAB for i in range(40)]
    theirs = [*ours[:-1], 45]
    async with eagle(monkeypatch, tmp_path, block_size=BLOCK_SIZE) as worker:
        object.__setattr__(worker.loaded.limits, "max_drafts", 0)
        await run_copied_start(worker, ours, theirs)
        draft = backend_of(worker).draft
        assert draft is not None
        shared = draft.cache.storage[:, [3, 7]].transpose(1, 2).flatten(2, 3)[:, :, :39].clone()
        again = Sequence(theirs, 1)
        await StepDriver(worker.stream(), worker.limits).run([again])
        own = draft.cache.storage[:, again.blocks].transpose(1, 2).flatten(2, 3)[:, :, :39]
        # The last position of the prefix has the token that followed in the other sequence.
        torch.testing.assert_close(shared[:, :, :38], own[:, :, :38], atol=1e-4, rtol=1e-4)
        assert (shared[:, :, 38] - own[:, :, 38]).abs().max() > 0.1


async def test_a_nan_in_a_heads_kv_costs_drafts_and_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bigrams(tmp_path / "model")
    save_bigram_head(tmp_path / "head", tmp_path / "model")
    async with eagle(monkeypatch, tmp_path) as worker:
        draft = backend_of(worker).draft
        assert draft is not None
        with torch.inference_mode():
            draft.cache.storage[:, 1:] = torch.nan
        driver = StepDriver(worker.stream(), worker.limits)
        ran = Sequence([9, 3], 40, sampling=GREEDY)
        await driver.run([ran])
        assert worker.fatal == []
    assert ran.output == [(4 + i) % BIGRAM_VOCAB for i in range(40)]
    assert driver.drafts[DRAFTER] > 0
