"""What a worker does before it serves: when it compiles ahead, and how it tells where time went."""

import threading
import time
from pathlib import Path

import pytest
import torch

from pagewire.config import WorkerConfig
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_slots import DeviceSlots
from pagewire.worker.startup import compile_pool, cuda_context
from pagewire.worker.startup.compile_pool import start_compile_pool
from pagewire.worker.startup.cuda_context import open_cuda_context
from pagewire.worker.startup.phases import StartupPhases


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


def test_a_timeline_begins_with_the_process() -> None:
    before = StartupPhases()
    before.end("until now")
    time.sleep(0.05)
    timeline = StartupPhases()
    timeline.end("imports")
    assert 0.04 < timeline.seconds - before.seconds < 1
    time.sleep(0.05)
    timeline.end("sleeping")
    (imports, first), (sleeping, second) = (
        part.rsplit(" ", 1) for part in str(timeline).split(", ")
    )
    assert (imports, sleeping) == ("imports", "sleeping")
    assert float(first) + float(second) == pytest.approx(timeline.seconds, abs=0.11)


@pytest.mark.parametrize("longest", [1, 16, 33, 4096, 5000])
def test_the_longest_sequence_changes_no_kernel(longest: int) -> None:
    limits = Limits(512, 4, 16, 400, longest, 64)
    tables = DeviceSlots(limits, torch.device("cpu")).block_tables
    assert tables.stride(0) % 16 == 0
    assert limits.max_blocks <= tables.shape[1] < limits.max_blocks + 16


@pytest.mark.parametrize("vocab_size", [1, 512, 4097])
def test_rows_of_token_counts_are_aligned_whatever_the_vocabulary(vocab_size: int) -> None:
    limits = Limits(vocab_size, 4, 16, 400, 64, 64)
    adjustments = DeviceSlots(limits, torch.device("cpu")).sampling.adjustments
    assert adjustments is not None
    counts = adjustments.token_counts
    assert counts.stride(0) % 16 == 0
    assert vocab_size <= counts.shape[1] < vocab_size + 16
