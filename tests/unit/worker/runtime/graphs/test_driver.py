"""Calls of the NVIDIA driver, on a machine without one."""

import ctypes

import pytest

from pagewire.worker.errors import SetupError
from pagewire.worker.runtime.graphs import driver


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldDriver:
        """Has the calls of CUDA 12.2."""

        def __getattr__(self, name: str) -> object:
            if name == "cuStreamBeginCaptureToGraph":
                raise AttributeError(f"undefined symbol: {name}")
            return lambda: None

    monkeypatch.setattr(ctypes, "PyDLL", lambda _: OldDriver())
    with pytest.raises(SetupError, match=r"no cuStreamBeginCaptureToGraph: .* CUDA 12\.3"):
        driver._driver()
