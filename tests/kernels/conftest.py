"""Kernel tests run on the GPU where there is one, otherwise under Triton's interpreter."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
