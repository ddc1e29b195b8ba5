"""Settings that a worker with a program as its model refuses."""

import pytest

from pagewire.config import WorkerConfig
from pagewire.worker.command.loading import load_command
from pagewire.worker.errors import SetupError


@pytest.mark.parametrize(
    ("setting", "flag"),
    [({"batch_invariant": True}, "--batch-invariant"), ({"host_memory_gb": 1.0}, "--host-memory")],
)
def test_settings_of_kernels_are_refused(setting: dict, flag: str) -> None:
    config = WorkerConfig(model="embedded", backend="command", command="true", **setting)
    with pytest.raises(SetupError, match=flag):
        load_command(config)
