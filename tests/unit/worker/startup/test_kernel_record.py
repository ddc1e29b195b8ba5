"""The files of compiled kernels and measured GEMMs, and the worker that finds them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.config import WorkerConfig
from pagewire.worker.startup import compile_pool, kernel_record
from pagewire.worker.startup.kernel_record import KernelRecord, cache_folder


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerConfig:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"hidden_size": 64}))
    return WorkerConfig(model=str(model))


def test_kernels_are_recorded_for_workers_with_the_same(config: WorkerConfig) -> None:
    assert not KernelRecord(config).exists()
    KernelRecord(config).write()
    assert KernelRecord(config).exists()
    same = {"seed": 7, "load_format": "dummy", "max_model_len": 100, "gpu_memory_utilization": 0.5}
    assert KernelRecord(replace(config, **same)).exists()


@pytest.mark.parametrize(
    "other",
    [
        {"num_slots": 512},
        {"worker_max_num_batched_tokens": 16384},
        {"block_size": 32},
        {"dtype": "float16"},
        {"host_memory_gb": 1.0},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"batch_invariant": True},
        {"model": "embedded"},
    ],
    ids=str,
)
def test_other_workers_have_other_kernels(config: WorkerConfig, other: dict) -> None:
    KernelRecord(config).write()
    assert not KernelRecord(replace(config, **other)).exists()


def test_another_model_in_the_same_folder_has_other_kernels(config: WorkerConfig) -> None:
    KernelRecord(config).write()
    (Path(config.model) / "config.json").write_text(json.dumps({"hidden_size": 128}))
    assert not KernelRecord(config).exists()


def test_other_versions_and_gpus_have_other_kernels(
    config: WorkerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KernelRecord(config).write()
    gpu = tmp_path / "gpus" / "0000:00:01.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: \t\t 27\n")
    with monkeypatch.context() as patched:
        patched.setattr(kernel_record, "GPUS", tmp_path / "gpus")
        assert not KernelRecord(config).exists()
    assert KernelRecord(config).exists()
    monkeypatch.setattr(kernel_record, "version", lambda package: "0.1")
    assert not KernelRecord(config).exists()


def test_a_worker_with_recorded_kernels_starts_no_pool(
    config: WorkerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(compile_pool, "CompilePool", lambda: started.append(None))
    monkeypatch.setattr(compile_pool, "NVIDIA_DRIVER", tmp_path)
    compile_pool.start_compile_pool(config)
    assert len(started) == 1
    KernelRecord(config).write()
    assert compile_pool.start_compile_pool(config) is None
    assert len(started) == 1


def test_what_cannot_be_read_or_written_is_not_recorded(
    config: WorkerConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = replace(config, model=str(tmp_path / "none"))
    KernelRecord(missing).write()
    assert not KernelRecord(missing).exists()
    (tmp_path / "cache").write_text("no folder")
    KernelRecord(config).write()
    assert "look for kernels to compile again" in caplog.text
    assert not KernelRecord(config).exists()


def test_gemms_are_kept_for_workers_with_the_same(config: WorkerConfig) -> None:
    assert KernelRecord(config).gemms() is None
    for choices in ({"algorithms": []}, {"algorithms": [[8, 16, 16, "bfloat16", False, "00"]]}):
        KernelRecord(config).keep_gemms(choices)
        assert KernelRecord(replace(config, seed=7)).gemms() == choices
    assert KernelRecord(replace(config, num_slots=512)).gemms() is None
    assert not KernelRecord(config).exists(), "kernels may still be missing"
    assert len(list(cache_folder().iterdir())) == 1, "no file is left half written"


def test_gemms_that_cannot_be_read_or_kept_are_measured_again(
    config: WorkerConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    KernelRecord(config).keep_gemms({"algorithms": []})
    [kept] = cache_folder().iterdir()
    for broken in ("", "[]", '{"algorithms": ['):
        kept.write_text(broken)
        assert KernelRecord(config).gemms() is None
    kept.unlink()
    kept.parent.rmdir()
    kept.parent.write_text("no folder")
    KernelRecord(config).keep_gemms({"algorithms": []})
    assert "measure GEMMs again" in caplog.text


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME", None])
def test_it_lies_in_the_cache_that_triton_uses(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = pytest.importorskip("triton.knobs", reason="triton is not installed")
    for variable in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(variable, raising=False)
    if name is not None:
        monkeypatch.setenv(name, str(tmp_path))
    assert cache_folder() == Path(knobs.cache_knobs().dir)
