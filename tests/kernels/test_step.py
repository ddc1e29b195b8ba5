"""The kernels at the two ends of a decode step against their twins."""

import pytest
import torch

from pagewire.limits import MAX_STOP_IDS
from pagewire.worker.ops.reference import step as reference
from pagewire.worker.ops.reference.sampling import SamplingState
from pagewire.worker.ops.triton import step as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, MAX_BLOCKS, VOCAB = 12, 9, 50


def make_inputs(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct slots; a block table write for every second row, the others name the padding."""
    inputs = torch.zeros(reference.NUM_INPUTS, rows, dtype=torch.int32)
    inputs[reference.SLOTS] = torch.randperm(SLOTS - 1, generator=generator)[:rows]
    inputs[reference.POSITIONS] = torch.randint(0, 100, (rows,), generator=generator)
    inputs[reference.INDICES] = torch.randint(0, 100, (rows,), generator=generator)
    inputs[reference.WRITE_SLOTS] = SLOTS - 1
    written = inputs[reference.SLOTS, ::2]
    inputs[reference.WRITE_SLOTS, ::2] = written
    inputs[reference.WRITE_COLUMNS, ::2] = 1 + written % (MAX_BLOCKS - 1)
    inputs[reference.WRITE_BLOCKS, ::2] = 100 + written
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


@pytest.mark.parametrize("rows", [1, 5, 11])
def test_gather_sampling(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)

    def ints(*shape: int) -> torch.Tensor:
        drawn = torch.randint(-5, 1000, shape, generator=generator, dtype=torch.int32)
        return drawn.to(DEVICE)

    def floats() -> torch.Tensor:
        return torch.rand(SLOTS, generator=generator).to(DEVICE)

    seed = torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator).to(DEVICE)
    by_slot = SamplingState(
        temperature=floats(),
        top_k=ints(SLOTS),
        top_p=floats(),
        min_p=floats(),
        seed=seed,
        index=ints(SLOTS),
        min_tokens=ints(SLOTS),
        stop_token_ids=ints(SLOTS, MAX_STOP_IDS),
    )
    slots = torch.randperm(SLOTS, generator=generator)[:rows].int().to(DEVICE)
    want = reference.gather_sampling(by_slot, slots, slots)
    got = kernels.gather_sampling(by_slot, slots, slots)
    for name in SamplingState.__slots__:
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
