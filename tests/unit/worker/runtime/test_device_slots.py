"""The slot state on the device: strides that kernels are compiled for, and forced tokens."""

import numpy as np
import pytest
import torch

from pagewire.worker.protocol.steps.forced_texts import ForcedTexts
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_slots import DeviceSlots

CPU = torch.device("cpu")


@pytest.mark.parametrize("longest", [1, 16, 33, 4096, 5000])
def test_the_longest_sequence_changes_no_kernel(longest: int) -> None:
    limits = Limits(512, 4, 16, 400, longest, 64)
    tables = DeviceSlots(limits, CPU).block_tables
    assert tables.stride(0) % 16 == 0
    assert limits.max_blocks <= tables.shape[1] < limits.max_blocks + 16


@pytest.mark.parametrize("vocab_size", [1, 512, 4097])
def test_rows_of_token_counts_are_aligned_whatever_the_vocabulary(vocab_size: int) -> None:
    limits = Limits(vocab_size, 4, 16, 400, 64, 64)
    adjustments = DeviceSlots(limits, CPU).sampling.adjustments
    assert adjustments is not None
    counts = adjustments.token_counts
    assert counts.stride(0) % 16 == 0
    assert vocab_size <= counts.shape[1] < vocab_size + 16


def test_forced_tokens_are_those_of_slot_and_index() -> None:
    outputs = {b"": np.array([11, 12], np.int32)}
    slots = DeviceSlots(Limits(512, 4, 16, 400, 64, 64, forced=ForcedTexts(outputs)), CPU)
    assert slots.forced_tokens is not None
    slots.forced_tokens[3, :2] = torch.tensor([11, 12], dtype=torch.int32)
    rows = torch.tensor([3, 3, 3, 0], dtype=torch.int32)
    indices = torch.tensor([0, 1, 2, 0], dtype=torch.int32)
    drawn = torch.full((4,), 7, dtype=torch.int32)
    assert slots.forced(drawn, rows, indices).tolist() == [11, 12, 7, 7]


def test_slots_and_indices_that_no_kernel_has_written_are_harmless() -> None:
    """While a worker collects kernels, buffers hold old content of memory."""
    outputs = {b"": np.array([11, 12], np.int32)}
    slots = DeviceSlots(Limits(512, 4, 16, 400, 64, 64, forced=ForcedTexts(outputs)), CPU)
    anything = torch.tensor([-(2**31), -1, 2**31 - 1, 999], dtype=torch.int32)
    assert len(slots.forced(torch.zeros(4, dtype=torch.int32), anything, anything)) == 4
