"""The kernel that copies KV blocks between two memories against its reference."""

import pytest
import torch

from pagewire.worker.ops.reference import blocks as reference
from pagewire.worker.ops.triton import blocks as kernels

# A piece of the kernel is 4096 values.
VALUES = (12, 4096, 5000, 16384)


def memories(parts: int, values: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks of the device, parts first, and of the host, where parts of a block adjoin."""
    generator = torch.Generator().manual_seed(values)
    blocks = torch.randn(parts, 9, values, generator=generator).to(dtype)
    host_blocks = torch.randn(7, parts, values, generator=generator).to(dtype)
    if torch.cuda.is_available():
        return blocks.cuda(), host_blocks.pin_memory().transpose(0, 1)
    return blocks, host_blocks.transpose(0, 1)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("parts", [2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copy_blocks(device: torch.device, parts: int, values: int, dtype: torch.dtype) -> None:
    here = torch.tensor([3, 8, 0, 1], dtype=torch.int32, device=device)
    there = torch.tensor([6, 0, 2, 5], dtype=torch.int32, device=device)
    for to_host in (True, False):
        blocks, host_blocks = memories(parts, values, dtype)
        source, sources = (blocks, here) if to_host else (host_blocks, there)
        target, targets = (host_blocks, there) if to_host else (blocks, here)
        want = target.clone()
        reference.copy_blocks(source, sources, want, targets)
        got = kernels.copy_blocks(source, sources, target, targets)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        assert got is target
        assert torch.equal(got, want)
        assert torch.equal(
            got[:, targets.to(got.device)].cpu(), source[:, sources.to(source.device)].cpu()
        )


def test_nothing_to_copy_changes_nothing(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int32, device=device)
    for copy_blocks in (reference.copy_blocks, kernels.copy_blocks):
        blocks, host_blocks = memories(2, 12, torch.float32)
        before = host_blocks.clone()
        copy_blocks(blocks, none, host_blocks, none)
        assert torch.equal(host_blocks, before)
