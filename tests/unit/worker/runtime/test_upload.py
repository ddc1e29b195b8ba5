"""Memory that the driver does not pin: the error names its use and the setting to lower."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.config import WorkerConfig
from pagewire.worker.errors import SetupError
from pagewire.worker.ops.reference import ops as reference
from pagewire.worker.protocol.constraints.mask_memory import MaskMemory
from pagewire.worker.runtime import host_cache
from pagewire.worker.runtime.graphs.mask_gate import MaskGate


@pytest.fixture(autouse=True)
def _full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that pins nothing."""
    driver = SimpleNamespace(cudaHostRegister=lambda *_: 2, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)


def flags_in(error: Any) -> set[str]:
    return {word for word in str(error.value).split() if word.startswith("--")}


def test_masks_that_cannot_be_pinned_name_their_flag() -> None:
    with pytest.raises(SetupError, match="memory, for masks of structured output, ") as made:
        MaskGate(reference, MaskMemory(4, 8), torch.device("cuda"))
    assert flags_in(made) == {"--num-slots"}


def test_kv_that_cannot_be_pinned_names_its_flag() -> None:
    cache = object.__new__(host_cache.HostCache)
    cache._device = torch.device("cuda")
    with pytest.raises(SetupError, match="GB of the host's memory, for KV, cannot be") as made:
        cache._allocated(torch.from_numpy(np.zeros((2, 3, 4), np.float32)), 5)
    assert flags_in(made) == {"--host-memory-gb"}


def test_the_flags_exist() -> None:
    assert {"num_slots", "host_memory_gb"} <= WorkerConfig.__dataclass_fields__.keys()
