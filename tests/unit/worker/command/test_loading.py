"""Settings that a worker with a program as its model refuses."""

import pytest

from pagewire.config import WorkerConfig
from pagewire.worker.command.loading import load_command
from pagewire.worker.errors import SetupError


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"batch_invariant": True}, "--batch-invariant has no use"),
        ({"draft_model": "small"}, "--draft-model small has no use"),
        ({"dtype": "float16"}, "--dtype float16 has no use"),
        ({"forced_texts": "x.jsonl"}, "--forced-texts x.jsonl has no use"),
        ({"host_memory_gb": 1.0}, "--host-memory-gb 1.0 has no use"),
        ({"load_format": "dummy"}, "--load-format dummy has no use"),
        ({"ops": "triton"}, "--ops triton has no use"),
        ({"speculate": "suffix"}, "--speculate suffix has no use"),
        ({"task": "embed"}, "--task embed has no use"),
    ],
)
def test_settings_without_use_are_refused(setting: dict, flag: str) -> None:
    config = WorkerConfig(model="embedded", backend="command", command="true", **setting)
    with pytest.raises(SetupError, match=flag):
        load_command(config)
