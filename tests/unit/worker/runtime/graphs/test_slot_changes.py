"""Changes of slots by graphs: all are stored, however many a step has."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagewire.sampling import SamplingNumbers
from pagewire.worker.ops import load_ops
from pagewire.worker.protocol.steps.device_plan import (
    DevicePlan,
    SlotStarts,
    TableWrites,
    dummy_plan,
    slot_numbers,
)
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_slots import DeviceSlots
from pagewire.worker.runtime.graphs import slot_changes
from support.models.host_graphs import CopiedAtOnce, HostCaptures

CPU = torch.device("cpu")
LIMITS = Limits(512, 100, 16, 4000, 640, 64)


def plan_of(starts: int, writes: int) -> DevicePlan:
    """A plan with distinct slots and entries, and values that tell them apart."""
    slots = np.random.default_rng(0).permutation(LIMITS.num_slots)[:starts].astype(np.int32)
    numbers = [SamplingNumbers(temperature=slot / 100, top_k=slot) for slot in slots.tolist()]
    places = np.random.default_rng(1).permutation(100 * 40)[:writes].astype(np.int32)
    plan = dummy_plan(LIMITS, decodes=1, chunks=0, chunk_length=0)
    return replace(
        plan,
        starts=SlotStarts(
            slots=slots,
            numbers=slot_numbers(numbers),
            seed=slots.astype(np.int64) - 50,
            min_tokens=slots + 1,
            stop_token_ids=np.tile(slots[:, None], 16),
            adjustment_kinds=np.zeros(starts, np.int32),
        ),
        writes=TableWrites(places // 40, places % 40, 1 + places),
    )


@pytest.mark.parametrize(
    ("starts", "writes"), [(1, 3), (32, 1024), (33, 10), (2, 1025), (90, 3999)]
)
def test_all_changes_are_stored(starts: int, writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_changes, "Staging", CopiedAtOnce)
    slots, ops = DeviceSlots(LIMITS, CPU), load_ops("torch")
    changes = slot_changes.SlotChanges(ops, slots, CPU)
    changes.capture(HostCaptures())
    plan = plan_of(starts, writes)
    changes.launch(plan)

    expected = DeviceSlots(LIMITS, CPU)
    expected.apply(ops, plan)
    assert torch.equal(slots.block_tables, expected.block_tables)
    assert int((slots.block_tables != 0).sum()) == writes
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "stop_token_ids"):
        got = getattr(slots.sampling, name)
        assert torch.equal(got, getattr(expected.sampling, name)), name
    assert int((slots.sampling.min_tokens > 0).sum()) == starts
    started = slots.sampling.min_tokens > 0
    assert torch.equal(slots.sampling.seed[started], slots.sampling.min_tokens[started] - 51)
