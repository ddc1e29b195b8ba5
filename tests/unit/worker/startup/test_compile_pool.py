"""When a worker compiles kernels ahead."""

from pathlib import Path

import pytest

from pagewire.config import WorkerConfig
from pagewire.worker.startup import compile_pool
from pagewire.worker.startup.compile_pool import start_compile_pool


def test_only_a_worker_that_may_have_a_gpu_compiles_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(compile_pool, "CompilePool", lambda: started.append(None))
    monkeypatch.setattr(compile_pool, "NVIDIA_DRIVER", tmp_path / "missing")
    start_compile_pool(WorkerConfig())
    assert not started
    monkeypatch.setattr(compile_pool, "NVIDIA_DRIVER", tmp_path)
    start_compile_pool(WorkerConfig(device="cpu"))
    start_compile_pool(WorkerConfig(ops="torch"))
    assert not started
    start_compile_pool(WorkerConfig())
    start_compile_pool(WorkerConfig(device="cuda:1"))
    assert len(started) == 2
