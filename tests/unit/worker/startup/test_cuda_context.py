"""The CUDA context that a worker opens while it imports torch."""

import threading

import pytest

from pagewire.config import WorkerConfig
from pagewire.worker.startup import cuda_context
from pagewire.worker.startup.cuda_context import open_cuda_context


def test_a_context_is_begun_for_a_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setattr(cuda_context, "_open", opened.append)
    for device in ("auto", "cuda", "cuda:1", "cpu", "cuda:one"):
        thread = open_cuda_context(WorkerConfig(device=device))
        if thread is not None:
            thread.join()
    assert opened == [0, 0, 1]


def test_a_machine_without_a_driver_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(cuda_context, "DRIVER", "libmissing.so")
    thread = open_cuda_context(WorkerConfig())
    assert thread is not None
    thread.join()
    assert not failed
