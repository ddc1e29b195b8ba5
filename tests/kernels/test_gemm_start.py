"""At its start a worker measures its GEMMs, or uses what an earlier start has measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagewire.config import WorkerConfig
from pagewire.models import EMBEDDED
from pagewire.worker.startup import tuning
from pagewire.worker.startup.kernel_record import KernelRecord

KEPT = {"algorithms": [[8, 16, 16, "bfloat16", False, "00"]]}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The models whose GEMMs are measured."""
    measured: list[Any] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def measure(decoder: Any, *_: Any) -> int:
        measured.append(decoder)
        return 1

    monkeypatch.setattr(tuning, "_measure_gemms", measure)
    monkeypatch.setattr(tuning, "choices", lambda _: KEPT)
    monkeypatch.setattr(tuning, "use_choices", lambda kept, _: kept == KEPT)
    return measured


@pytest.fixture
def models() -> list[Any]:
    """A model and a draft model."""
    weights = SimpleNamespace(embedding=torch.zeros(1))
    return [SimpleNamespace(weights=weights), SimpleNamespace(weights=weights)]


def start(models: list[Any], batch_invariant: bool = False) -> None:
    record = KernelRecord(WorkerConfig(model=EMBEDDED, batch_invariant=batch_invariant))
    tuning.choose_gemms(models, None, batch_invariant, record)  # type: ignore[arg-type]


def test_only_the_first_start_measures(measured: list[Any], models: list[Any]) -> None:
    start(models)
    assert measured == models
    start(models)
    assert measured == models


def test_it_measures_again_if_choices_are_of_another_gpu(
    measured: list[Any], models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(models)
    monkeypatch.setattr(tuning, "use_choices", lambda *_: False)
    start(models)
    assert measured == 2 * models


def test_each_start_with_one_answer_compares_bits(measured: list[Any], models: list[Any]) -> None:
    for _ in range(2):
        start(models, batch_invariant=True)
    assert measured == 2 * models


def test_a_failed_measurement_is_logged_and_repeated(
    measured: list[Any],
    models: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> int:
            raise RuntimeError("out of memory")

        patched.setattr(tuning, "_measure_gemms", fail)
        start(models)
    assert "keep torch's algorithms: out of memory" in caplog.text
    start(models)
    assert measured == models
