"""Strides of the slot state on the device, which kernels are compiled for."""

import pytest
import torch

from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_slots import DeviceSlots


@pytest.mark.parametrize("longest", [1, 16, 33, 4096, 5000])
def test_the_longest_sequence_changes_no_kernel(longest: int) -> None:
    limits = Limits(512, 4, 16, 400, longest, 64)
    tables = DeviceSlots(limits, torch.device("cpu")).block_tables
    assert tables.stride(0) % 16 == 0
    assert limits.max_blocks <= tables.shape[1] < limits.max_blocks + 16


@pytest.mark.parametrize("vocab_size", [1, 512, 4097])
def test_rows_of_token_counts_are_aligned_whatever_the_vocabulary(vocab_size: int) -> None:
    limits = Limits(vocab_size, 4, 16, 400, 64, 64)
    adjustments = DeviceSlots(limits, torch.device("cpu")).sampling.adjustments
    assert adjustments is not None
    counts = adjustments.token_counts
    assert counts.stride(0) % 16 == 0
    assert vocab_size <= counts.shape[1] < vocab_size + 16
