"""The kernel that applies masks against its reference."""

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
