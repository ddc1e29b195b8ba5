"""The kernels that wait for masks and fetch them, against their references."""

import threading
import time
from types import ModuleType

import pytest
import torch

from pagewire.worker.ops.reference import sampling as reference
from pagewire.worker.ops.triton import masks as kernels

BOTH = pytest.mark.parametrize("ops", [reference, kernels])


def host_memory(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The values in memory of the host that the device can read."""
    return values.pin_memory() if device.type == "cuda" else values


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@BOTH
@pytest.mark.parametrize("late", [0.0, 0.2])
@pytest.mark.parametrize("begin", [0, 1])  # of the rows: their addresses have any alignment
def test_await_masks(device: torch.device, ops: ModuleType, late: float, begin: int) -> None:
    ready = host_memory(torch.zeros(6, dtype=torch.int64), device)
    mask_rows = torch.tensor([4, 4, -1, 0, -1], dtype=torch.int32, device=device)[begin:]
    stamps = torch.tensor([(7 << 32) + 3] * 2 + [1 << 40, 8 << 32, 1 << 40], device=device)[begin:]

    def write() -> None:
        time.sleep(late / 2)
        ready[4] = (7 << 32) + 3  # the very token
        ready[5] = 1 << 50  # of no row
        time.sleep(late / 2)
        ready[0] = 9 << 32  # a later sequence

    ops.await_masks(ready, torch.full_like(mask_rows, -1), stamps)  # no row has a mask
    finish(device)
    writer = threading.Thread(target=write)
    began = time.monotonic()
    writer.start()
    ops.await_masks(ready, mask_rows, stamps)
    finish(device)
    assert time.monotonic() - began >= 0.9 * late
    assert ready[0] == 9 << 32
    writer.join()


@BOTH
@pytest.mark.parametrize("words", [32, 4768, 8224])  # one piece, and several
def test_fetch_masks(device: torch.device, ops: ModuleType, words: int) -> None:
    generator = torch.Generator().manual_seed(words)
    host = torch.randint(-(2**31), 2**31, (6, words), generator=generator).int()
    host = host_memory(host, device)
    mask_rows = torch.tensor([4, -1, 0, -1, -1, -1, -1, 4, 2], dtype=torch.int32, device=device)
    masks = torch.full((6, words), 5, dtype=torch.int32, device=device)
    for _ in range(2):  # the second time the memory has other values
        host += 1
        ops.fetch_masks(host, mask_rows, masks)
        finish(device)
        assert torch.equal(masks[[0, 2, 4]].cpu(), host[[0, 2, 4]])
        assert (masks[[1, 3, 5]] == 5).all()


@BOTH
def test_note_time(device: torch.device, ops: ModuleType) -> None:
    times = host_memory(torch.full((4,), -7, dtype=torch.int64), device)
    for turn in (2, 0):
        ops.note_time(times, torch.tensor([turn, 1, 3], dtype=torch.int32, device=device))
        finish(device)
        time.sleep(0.05)
    assert times[[1, 3]].tolist() == [-7, -7]
    if device.type == "cuda" or ops is reference:  # the interpreter has no clock
        assert 0.04e9 < times[0] - times[2] < 60e9
    else:
        assert times[[0, 2]].tolist() == [0, 0]
