"""Kernel tests run on the GPU where there is one, otherwise under Triton's interpreter."""

import os

import pytest
import torch

# Triton reads this when it is imported, so it is set before any test module is collected.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
