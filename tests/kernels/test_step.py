"""The kernels that change slots, and those at the beginning and the end of a decode step, against
their references."""

from dataclasses import fields, replace
from types import ModuleType

import pytest
import torch

from pagewire.limits import MAX_BIASES, MAX_STOP_IDS
from pagewire.worker.ops.contract import step as contract
from pagewire.worker.ops.contract.sampling import (
    BIASED,
    IN_PROMPT,
    MAX_COUNTED,
    PENALIZED,
    Adjustments,
    SamplingState,
)
from pagewire.worker.ops.reference import step as reference
from pagewire.worker.ops.triton import step as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, MAX_BLOCKS, VOCAB = 12, 9, 50


def make_inputs(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct slots; every second row writes to its block table, others name the padding."""
    inputs = torch.zeros(contract.NUM_INPUTS, rows, dtype=torch.int32)
    inputs[contract.SLOTS] = torch.randperm(SLOTS - 1, generator=generator)[:rows]
    inputs[contract.POSITIONS] = torch.randint(0, 100, (rows,), generator=generator)
    inputs[contract.INDICES] = torch.randint(0, 100, (rows,), generator=generator)
    inputs[contract.WRITE_SLOTS] = SLOTS - 1
    written = inputs[contract.SLOTS, ::2]
    inputs[contract.WRITE_SLOTS, ::2] = written
    inputs[contract.WRITE_COLUMNS, ::2] = 1 + written % (MAX_BLOCKS - 1)
    inputs[contract.WRITE_BLOCKS, ::2] = 100 + written
    return inputs.to(DEVICE)


@pytest.mark.parametrize("rows", [1, 2, 7, 11])
@pytest.mark.parametrize("hidden", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_begin_decode(rows: int, hidden: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs = make_inputs(rows, generator)
    embedding = torch.randn(VOCAB, hidden, generator=generator).to(DEVICE, dtype)
    last = torch.randint(0, VOCAB, (SLOTS,), generator=generator, dtype=torch.int32).to(DEVICE)
    tables = torch.zeros(SLOTS, MAX_BLOCKS, dtype=torch.int32, device=DEVICE)
    want_tables = tables.clone()
    want = reference.begin_decode(inputs, embedding, last, want_tables)
    got = kernels.begin_decode(inputs, embedding, last, tables)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(tables, want_tables)


def make_adjustments(kinds: torch.Tensor) -> Adjustments:
    return Adjustments(
        kinds=kinds,
        slots=torch.arange(SLOTS, dtype=torch.int32, device=DEVICE),
        token_counts=torch.zeros(SLOTS, VOCAB + 14, dtype=torch.int16, device=DEVICE),
        penalties=torch.zeros(SLOTS, 3, device=DEVICE),
        bias_ids=torch.zeros(SLOTS, MAX_BIASES, dtype=torch.int32, device=DEVICE),
        biases=torch.zeros(SLOTS, MAX_BIASES, device=DEVICE),
    )


def make_ints(generator: torch.Generator, *shape: int) -> torch.Tensor:
    drawn = torch.randint(-5, 1000, shape, generator=generator, dtype=torch.int32)
    return drawn.to(DEVICE)


def make_state(generator: torch.Generator) -> SamplingState:
    def ints(*shape: int) -> torch.Tensor:
        return make_ints(generator, *shape)

    def floats() -> torch.Tensor:
        return torch.rand(SLOTS, generator=generator).to(DEVICE)

    return SamplingState(
        temperature=floats(),
        top_k=ints(SLOTS),
        top_p=floats(),
        min_p=floats(),
        seed=torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator).to(DEVICE),
        index=ints(SLOTS),
        min_tokens=ints(SLOTS),
        stop_token_ids=ints(SLOTS, MAX_STOP_IDS),
    )


def copied(state: SamplingState) -> SamplingState:
    tensors = {
        field.name: getattr(state, field.name).clone()
        for field in fields(SamplingState)
        if field.name not in ("adjustments", "masks")
    }
    adjustments = state.adjustments
    if adjustments is not None:
        adjustments = replace(adjustments, kinds=adjustments.kinds.clone())
    return SamplingState(**tensors, adjustments=adjustments)


@pytest.mark.parametrize("adjusted", [False, True])
def test_start_slots(adjusted: bool) -> None:
    """Values are bits, seeds of either sign have both halves, and a row without a slot nothing."""
    generator = torch.Generator().manual_seed(3)
    state = make_state(generator)
    if adjusted:
        state = replace(state, adjustments=make_adjustments(make_ints(generator, SLOTS)))
    seeds = [-1, 2**63 - 1, -(2**63), 5 << 32, 7, 2**31]
    slots = [3, -1, 0, SLOTS - 1, -1, 6]
    starts = make_ints(generator, len(slots), contract.START_VALUES)
    starts[:, contract.START_SLOT] = torch.tensor(slots, dtype=torch.int32)
    columns = slice(contract.START_SEED, contract.START_SEED + 2)
    starts[:, columns] = torch.tensor(seeds, device=DEVICE).view(torch.int32).view(-1, 2)
    for column in (contract.START_TEMPERATURE, contract.START_TOP_P, contract.START_MIN_P):
        starts[:, column] = torch.rand(len(slots), generator=generator).to(DEVICE).view(torch.int32)
    before, got, want = state, copied(state), copied(state)
    reference.start_slots(starts, want)
    kernels.start_slots(starts, got)
    for name in set(SamplingState.__slots__) - {"adjustments", "masks"}:
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for row, slot in enumerate(slots):
        if slot >= 0:
            assert int(got.seed[slot]) == seeds[row]
            bits = starts[row, contract.START_TOP_P].view(torch.float32)
            assert torch.equal(got.top_p[slot], bits)
            assert torch.equal(got.stop_token_ids[slot], starts[row, contract.START_STOPS :])
    others = torch.tensor([slot for slot in range(SLOTS) if slot not in slots], device=DEVICE)
    assert torch.equal(got.seed[others], before.seed[others])
    if adjusted:
        assert torch.equal(got.adjustments.kinds, want.adjustments.kinds)
        assert int(got.adjustments.kinds[3]) == int(starts[0, contract.START_KINDS])


@pytest.mark.parametrize("count", [1, 127, 128, 300])
def test_write_tables(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    tables = torch.zeros(70, 16, dtype=torch.int32, device=DEVICE)
    places = torch.randperm(70 * 16, generator=generator)[:count]
    writes = torch.stack((places // 16, places % 16, 1 + places), 1).int()
    writes[1::3, contract.TABLE_SLOT] = -1
    want = tables.clone()
    reference.write_tables(writes.to(DEVICE), want)
    kernels.write_tables(writes.to(DEVICE), tables)
    assert torch.equal(tables, want)
    assert int((tables != 0).sum()) == int((writes[:, 0] >= 0).sum())
    assert int(tables[int(writes[0, 0]), int(writes[0, 1])]) == 1 + int(places[0])


@pytest.mark.parametrize("rows", [1, 5, 11, 30])
def test_gather_sampling(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    by_slot = make_state(generator)
    # With drafts a step has several rows of a slot, and more rows than slots.
    slots = torch.cat([torch.randperm(SLOTS, generator=generator) for _ in range(3)])
    slots = slots[:rows].int().to(DEVICE)
    want = reference.gather_sampling(by_slot, slots, slots)
    got = kernels.gather_sampling(by_slot, slots, slots)
    for name in set(SamplingState.__slots__) - {"adjustments", "masks"}:
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert want.adjustments is None
    assert got.adjustments is None

    by_slot = replace(by_slot, adjustments=make_adjustments(make_ints(generator, SLOTS)))
    want = reference.gather_sampling(by_slot, slots, slots).adjustments
    got = kernels.gather_sampling(by_slot, slots, slots).adjustments
    assert torch.equal(want.kinds, by_slot.adjustments.kinds[slots])
    for name in Adjustments.__slots__:
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("hidden", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_end_decode(hidden: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(6, hidden, generator=generator).to(DEVICE, dtype)
    state[1, hidden - 1] = float("nan")
    state[2, 0] = float("inf")
    state[4, 3] = float("-inf")
    tokens = torch.arange(10, 16, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, 0, 7, 1, 9, 4], dtype=torch.int32, device=DEVICE)
    last = torch.full((SLOTS,), 99, dtype=torch.int32, device=DEVICE)
    want_last = last.clone()
    want = reference.end_decode(tokens, state, slots, want_last)
    got = kernels.end_decode(tokens, state, slots, last)
    assert want.tolist() == [10, -1, -1, 13, -1, 15]
    assert torch.equal(got, want)
    assert torch.equal(last, want_last)


@pytest.mark.parametrize("ops", [reference, kernels])
def test_end_decode_counts_tokens_of_slots_with_penalties(ops: ModuleType) -> None:
    hidden = torch.zeros(6, 64, device=DEVICE)
    hidden[1, 5] = float("nan")
    tokens = torch.tensor([7, 7, 7, VOCAB - 1, 0, 9], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, 0, 6, 1, 9, SLOTS - 1], dtype=torch.int32, device=DEVICE)
    kinds = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    kinds[[0, 1, 9]], kinds[3], kinds[6] = PENALIZED, PENALIZED | BIASED, BIASED
    adjustments = make_adjustments(kinds)
    counts = adjustments.token_counts
    counts[1, VOCAB - 1], counts[9, 0] = IN_PROMPT, IN_PROMPT + MAX_COUNTED
    last = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        ops.end_decode(tokens, hidden, slots, last, adjustments)
    assert counts[3, 7] == 2
    assert counts[1, VOCAB - 1] == IN_PROMPT + 2
    assert counts[9, 0] == IN_PROMPT + MAX_COUNTED == -1, "the count stops at its maximum"
    assert counts.count_nonzero() == 3, "failed rows and slots without penalties are not counted"
