"""The kernels that fetch and apply masks against their references."""

import threading
import time

import pytest
import torch

from pagewire.worker.ops.reference import sampling as reference
from pagewire.worker.ops.triton import masks as kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "words"), [(50, 2), (4096, 128), (9001, 282), (9001, 300)])
def test_mask_logits(device: torch.device, dtype: torch.dtype, vocabulary: int, words: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(7, vocabulary + 3, generator=generator).to(device, dtype)[:, :vocabulary]
    mask_rows = torch.tensor([1, -1, 2, -1, -1, 0, -1], dtype=torch.int32, device=device)
    bits = torch.randint(-(2**31), 2**31, (3, words), generator=generator).int().to(device)
    want = logits.clone()
    reference.mask_logits(want, mask_rows, bits)
    for row, index in enumerate(mask_rows.tolist()):
        mask = bits[index].tolist() if index >= 0 else [-1] * words
        for token in range(vocabulary):
            allowed = mask[token // 32] >> (token % 32) & 1
            assert want[row, token] == (logits[row, token] if allowed else -torch.inf)
    kernels.mask_logits(logits, mask_rows, bits)
    assert torch.equal(logits, want)


@pytest.mark.parametrize("words", [2, 300, 4748])
@pytest.mark.parametrize("late", [0.0, 0.2])
def test_fetch_masks(device: torch.device, words: int, late: float) -> None:
    """Also of rows that become ready, or are given up, while the device waits."""
    generator = torch.Generator().manual_seed(words)
    host = torch.randint(-(2**31), 2**31, (6, words + 4), generator=generator).int()
    ready, given_up = (torch.zeros(6, dtype=torch.int64) for _ in range(2))
    if device.type == "cuda":
        host, ready, given_up = host.pin_memory(), ready.pin_memory(), given_up.pin_memory()
    host = host[:, :words]

    def write() -> None:
        time.sleep(late)
        ready[4] = (7 << 32) + 3  # the very token
        ready[0] = 9 << 32  # a later sequence
        given_up[2] = (1 << 32) + 2**31 - 1

    masks = torch.empty_strided(host.shape, host.stride(), dtype=torch.int32, device=device)
    rows = [[4, -1, 0, 2, -1], [7, 0, 8, 1, 0], [3, 0, 500, 9, 0]]
    slots, generations, indices = torch.tensor(rows, dtype=torch.int32, device=device)
    for fetch in (reference.fetch_masks, kernels.fetch_masks):
        masks.fill_(5)
        ready.zero_(), given_up.zero_()
        writer = threading.Thread(target=write)
        writer.start()
        began = time.monotonic()
        fetch(masks, host, ready, given_up, slots, generations, indices)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert time.monotonic() - began >= 0.9 * late
        writer.join()
        assert torch.equal(masks[[0, 2, 4]].cpu(), host[[0, 2, 4]])
        assert (masks[[1, 3, 5]] == 5).all()
