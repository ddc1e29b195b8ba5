"""A draft model or head on the graph backend: its code on a CPU, with torch's operations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from pagewire.models import resolve_model
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.steps.step import StepHostCopies
from pagewire.worker.runtime.graphs.backend import GraphBackend
from support.device_drafts import SharedWorker, drafting_worker, one_step_at_a_time
from support.drafted_sequences import (
    accepted,
    check_resumption,
    check_same,
    repetitive,
    sampling,
    sequences,
)
from support.eagle_heads import save_head
from support.models.constrained_sequences import constrained
from support.models.step_driver import LocalWorker, Sequence, StepDriver, local_worker
from support.models.tiny_models import save_model
from support.shortened_model import save_shortened

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOLDER = resolve_model("embedded")
LENGTH = 44
MODEL = pb.DRAFTER_DRAFT_MODEL
WAYS = [
    pb.SlotSampling(top_p=1),
    pb.SlotSampling(top_p=1, temperature=1, seed=5),
    pb.SlotSampling(top_p=0.8, temperature=0.9, seed=6),
]
CUTS = {"whole prompts": {"run_ahead": 2}, "chunks": {"run_ahead": 3, "chunk": 16}}


# The model itself comes last: the tests without this fixture then use the same worker.
@pytest.fixture(scope="module", params=["first layers", "another", "head", "itself"])
def draft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draft models of the embedded model: right always, often and almost never. A random head."""
    folder = tmp_path_factory.mktemp("draft")
    if request.param == "itself":
        return FOLDER
    if request.param == "first layers":
        return save_shortened(FOLDER, folder, layers=3)
    if request.param == "head":
        return save_head(folder, FOLDER, 3000)
    save_model(folder, "qwen3", vocab_size=4096, max_position_embeddings=4096)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[SharedWorker]:
    """Workers whose graphs draft with a model, as often as they can."""
    async with drafting_worker() as shared:
        yield shared


def drafting_with(draft: Path, **more: Any) -> dict[str, Any]:
    """The settings of a worker with a draft model or head."""
    sizes = {"num_blocks": 512, "max_model_len": 512, "worker_max_num_batched_tokens": 128}
    head = "Eagle" in (draft / "config.json").read_text()
    given = {"speculate": "eagle" if head else "draft", "draft_model": str(draft)}
    return sizes | given | more


def prompt(number: int) -> list[int]:
    """A prompt without repetitions."""
    return [40 + (number * 97 + i * 7) % 900 for i in range(20 + number)]


def asked() -> list[Sequence]:
    """Every way of drawing tokens, and prompts without repetitions."""
    more = [Sequence(prompt(i), LENGTH - i, sampling=way) for i, way in enumerate(WAYS)]
    return [*sequences(LENGTH), *more]


async def without_drafts(ran: list[Sequence], **cut: int) -> list[Sequence]:
    async with local_worker(FOLDER, num_blocks=512, max_model_len=512) as plain:
        await StepDriver(plain.stream(), plain.limits).run(ran, **cut)
    return ran


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wanted() -> dict[str, list[Sequence]]:
    """The sequences `asked` without drafts, by the way of cutting them, for all draft models."""
    return {name: await without_drafts(asked(), **cut) for name, cut in CUTS.items()}


@pytest.mark.parametrize("cut", CUTS)
async def test_tokens_are_those_of_steps_without_drafts(
    workers: SharedWorker, draft: Path, wanted: dict[str, list[Sequence]], cut: str
) -> None:
    want, got = wanted[cut], asked()
    got[-1].prediction = want[-1].output
    worker = await workers.get(FOLDER, **drafting_with(draft))
    driver = StepDriver(worker.stream(), worker.limits)
    await driver.run(got, **CUTS[cut])
    assert worker.fatal == []
    check_same(got, want)
    assert driver.drafts[MODEL] > 50
    assert driver.accepted[pb.DRAFTER_SUFFIX] > 20
    assert driver.accepted[pb.DRAFTER_PREDICTION] > 20


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled", "filtered"])
async def test_the_model_itself_is_right_nearly_always(
    workers: SharedWorker, way: pb.SlotSampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a temperature, because drafts are drawn with the noise of their tokens."""
    one_step_at_a_time(monkeypatch)
    (want,) = await without_drafts([Sequence(prompt(1), LENGTH, sampling=way)])
    worker = await workers.get(FOLDER, **drafting_with(FOLDER))
    before = accepted(worker, "draft_model")
    driver = StepDriver(worker.stream(), worker.limits)
    assert await driver.run([Sequence(prompt(1), LENGTH, sampling=way)]) == [want.output]
    assert driver.drafts[MODEL] > LENGTH / 2
    assert driver.accepted[MODEL] >= 0.95 * driver.drafts[MODEL]
    assert driver.number < LENGTH / 2
    # The worker counts them, too.
    assert accepted(worker, "draft_model") - before == driver.accepted[MODEL]


async def test_after_each_step_the_draft_model_has_the_kv_of_all_tokens(
    workers: SharedWorker, draft: Path
) -> None:
    """Also for tokens of another drafter, of steps with prompts, and for the last tokens."""
    ways = [*WAYS, sampling(temperature=0.7, seed=1)]
    told = await without_drafts([Sequence(prompt(9), LENGTH, sampling=WAYS[1])])
    ran = [Sequence(prompt(i), LENGTH - i, sampling=way) for i, way in enumerate(ways)]
    ran.append(Sequence(prompt(9), LENGTH, sampling=WAYS[1], prediction=told[0].output))
    ran.append(Sequence(repetitive(3), LENGTH, sampling=sampling()))
    penalized = sampling(presence_penalty=0.3)  # it has no drafts
    ran.append(Sequence(prompt(11), LENGTH, sampling=penalized))
    ran.append(constrained(1))  # its tokens are drawn in other graphs
    worker = await workers.get(FOLDER, **drafting_with(draft))
    driver = StepDriver(worker.stream(), worker.limits)
    await driver.run(ran, run_ahead=3, chunk=16)
    for drafter in (MODEL, pb.DRAFTER_PREDICTION, pb.DRAFTER_SUFFIX):
        assert driver.drafts[drafter] > 0
    written = [_kv(worker, sequence) for sequence in ran]
    # The same tokens as prompts.
    again = [Sequence(s.tokens + s.output, 1) for s in ran]
    await driver.run(again)
    for kv, sequence in zip(written, again, strict=True):
        whole = _kv(worker, sequence)
        torch.testing.assert_close(kv, whole[:, :, :-1], atol=1e-3, rtol=1e-3)
        assert kv.abs().amax((0, 1, 3)).min() > 0, "that of some token is missing"
    assert worker.fatal == []


def _kv(worker: LocalWorker, sequence: Sequence) -> torch.Tensor:
    """The draft model's KV `[2 * layers, heads, tokens, head_dim]` of all tokens but the last."""
    backend = worker.loaded.backend
    assert isinstance(backend, GraphBackend)
    assert backend.draft is not None
    count = len(sequence.tokens) + len(sequence.output) - 1
    kv = backend.draft.cache.storage[:, sequence.blocks]  # [parts, blocks, heads, block, dim]
    return kv.transpose(1, 2).flatten(2, 3)[:, :, :count].clone()


async def test_a_sequence_goes_on_where_it_was_preempted(
    workers: SharedWorker, draft: Path
) -> None:
    worker = await workers.get(FOLDER, **drafting_with(draft))
    await check_resumption(worker, LENGTH, (1, 30), run_ahead=3)
    assert worker.fatal == []


async def test_a_nan_in_the_draft_models_kv_costs_drafts_and_no_tokens(
    workers: SharedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_step_at_a_time(monkeypatch)
    (want,) = await without_drafts([Sequence(prompt(1), LENGTH)])
    worker = await workers.get(FOLDER, **drafting_with(FOLDER))
    backend = worker.loaded.backend
    with torch.inference_mode():
        backend.draft.cache.storage[:, 1:] = torch.nan
    driver = StepDriver(worker.stream(), worker.limits)
    assert await driver.run([Sequence(prompt(1), LENGTH)]) == [want.output]
    assert driver.drafts[MODEL] > 0


async def test_saved_blocks_and_scrubbed_ones_are_of_both_models(workers: SharedWorker) -> None:
    worker = await workers.get(FOLDER, **drafting_with(FOLDER, host_memory_gb=0.01))
    backend = worker.loaded.backend
    storages = [backend._cache.storage, backend.draft.cache.storage]
    one, none = np.array([3], np.int32), np.empty(0, np.int32)
    with torch.inference_mode():
        for storage in storages:
            storage[:, 3] = 0.5
    backend.copy(StepHostCopies(one, one, none, none))
    backend.copy(StepHostCopies(none, none, one, one + 4))
    for storage in storages:
        assert (storage[:, 7] == 0.5).all()
        with torch.inference_mode():
            storage[:, 7] = torch.nan
    backend.scrub(one + 4)
    assert all(storage[:, 7].isfinite().all() for storage in storages)
