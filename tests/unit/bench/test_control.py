"""The figures of the control benchmark."""

import pytest

from pagewire.bench.control import summarize
from pagewire.bench.control_load import Window


def window(tokens: int, cpu: float, tpot: float = 1.0, slowest: float = 1.0) -> Window:
    return Window(10.0, tokens, 100, {"scheduler": cpu}, tpot, slowest, 1.0)


def test_the_figures_are_those_of_the_targets() -> None:
    found = summarize(
        {
            "throughput": window(800_000, 5),
            "busy": window(256_000, 1),
            "step": window(256_000, 2),
            "few": window(100_000, 1),
            "many": window(100_000, 1.1),
            "alone": window(1, 1, 100, 105),
            "together": window(1, 1, 101, 110),
        }
    )
    assert list(found.values()) == pytest.approx(
        [80_000, 1.0, 2.0, 10.0, 11.0, 10.0, 100.0, 101.0, 110.0, 10.0]
    )
