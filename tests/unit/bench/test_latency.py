"""Latency statistics follow their definitions."""

import numpy as np
import pytest

from pagewire.bench.http_load import Timing
from pagewire.bench.latency import summarize, summary_text
from pagewire.objectives import Objectives


def timing(started: float, ttft: float, itls: list[float], tokens: int) -> Timing:
    return Timing(started, ttft, ttft + sum(itls), itls, prompt_tokens=10, output_tokens=tokens)


def test_figures_follow_their_definitions() -> None:
    timings = [
        timing(100.0, 0.1, [0.2, 0.2], 5),  # TPOT 0.4 / 4
        timing(100.5, 0.3, [0.5], 2),  # TPOT 0.5
        timing(100.2, 0.2, [], 1),  # no TPOT
        Timing(99.0, error="refused"),
    ]
    summary = summarize(timings, Objectives(ttft_ms=250, tpot_ms=200))
    assert (summary["requests"], summary["failed"]) == (4, 1)
    assert summary["seconds"] == pytest.approx(1.3)  # 100.0 to 101.3
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (30, 8)
    assert summary["output_tokens_per_second"] == pytest.approx(8 / 1.3)
    assert summary["total_tokens_per_second"] == pytest.approx(38 / 1.3)
    assert summary["goodput_requests_per_second"] == pytest.approx(2 / 1.3)
    assert summary["ttft_ms"]["mean"] == pytest.approx(200)
    assert summary["tpot_ms"]["median"] == pytest.approx(300)
    assert summary["itl_ms"]["p90"] == pytest.approx(np.percentile([200, 200, 500], 90))
    assert summary["e2e_ms"]["p99"] == pytest.approx(np.percentile([500, 800, 200], 99))
    assert "TPOT" in summary_text(summary)


def test_a_summary_of_nothing_but_failures() -> None:
    summary = summarize([Timing(1.0, error="x")], Objectives())
    assert (summary["failed"], summary["output_tokens_per_second"]) == (1, 0.0)
