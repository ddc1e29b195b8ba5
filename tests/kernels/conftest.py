"""Kernel tests run on the GPU if there is one, otherwise in Triton's interpreter."""

import pytest
import torch

if not torch.cuda.is_available():
    from support.kernels import quick_interpreter

    quick_interpreter.install()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
