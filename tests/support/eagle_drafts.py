"""Compares the drafts of an EAGLE-3 head on the graph backend with the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.ops.contract.drafts import MODEL
from pagewire.worker.protocol.steps.device_drafts import DeviceDrafts
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.draft_rows import first_rows
from pagewire.worker.runtime import device_drafts
from pagewire.worker.runtime.graphs.backend import GraphBackend
from support.eagle_heads import ReferenceHead
from support.models.step_driver import LocalWorker, Sequence, StepDriver

Drafts = list[tuple[int, int, list[int]]]  # slot, position of the last token, tokens


def four_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes workers draft four tokens of each sequence, with no other drafter."""
    monkeypatch.setattr(device_drafts, "SURE_MATCH", 1000)
    monkeypatch.setattr(DeviceDrafts, "_lengths", lambda _, slots, *__: np.full(len(slots), 4))


def backend_of(worker: LocalWorker) -> GraphBackend:
    backend = worker.loaded.backend
    assert isinstance(backend, GraphBackend)
    return backend


async def check_drafts(
    worker: LocalWorker, reference: ReferenceHead, vocabulary: int, right: int = 0
) -> None:
    """Runs prompts in chunks; compares all drafts and checks that at least `right` are right."""
    prompts = ([(i * 61 + j * j * 7) % vocabulary for j in range(20 + 9 * i)] for i in range(3))
    ran = [Sequence(prompt, 24, sampling=pb.SlotSampling(top_p=1)) for prompt in prompts]
    made = recorded(backend_of(worker))
    driver = StepDriver(worker.stream(), worker.limits)
    await driver.run(ran, chunk=16, run_ahead=3)
    assert worker.fatal == []
    assert driver.accepted[pb.DRAFTER_DRAFT_MODEL] >= right
    assert len(made) >= 15
    assert max(len(drafts) for _, _, drafts in made) == 4
    by_slot = {sequence.slot: sequence.tokens + sequence.output for sequence in ran}
    for slot, position, drafts in made:
        if position < len(by_slot[slot]):  # an ended sequence has no next token
            known = by_slot[slot][: position + 1]
            assert drafts == reference.drafts(known, len(drafts))


def recorded(backend: GraphBackend) -> Drafts:
    """All drafts that the backend's head makes from now on."""
    made: Drafts = []
    passes, history = backend._passes, backend._slots.history
    assert passes is not None
    assert history is not None
    launch = passes.launch

    def recording(plan: DevicePlan, *more: Any) -> None:
        before = history.num_drafts.clone()
        launch(plan, *more)
        for slot in plan.decode_slots[first_rows(plan)].tolist():
            count = int(history.num_drafts[slot])
            if count and not before[slot]:
                assert history.drafters[slot] == MODEL
                drafts = history.drafts[slot, :count].tolist()
                made.append((slot, int(history.positions[slot]), drafts))

    passes.launch = recording  # type: ignore[method-assign]
    return made
