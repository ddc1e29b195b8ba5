"""What a list of request timings adds up to.

Definitions as in the field: TTFT is the time to the first chunk with text; TPOT the time from the
first to the last chunk over the output tokens less one; ITL the time between chunks; E2E the time
to the last chunk; goodput the requests a second that met every objective.
"""

from typing import Any

from pagewire.bench.http_load import Timing
from pagewire.objectives import Objectives

_LATENCIES = ("ttft", "tpot", "itl", "e2e")


def summarize(timings: list[Timing], objectives: Objectives) -> dict[str, Any]:
    """Counts, rates over the time from the first request to the last chunk, and latencies."""
    good = [timing for timing in timings if timing.error is None]
    seconds = _span(good)
    output_tokens = sum(timing.output_tokens for timing in good)
    prompt_tokens = sum(timing.prompt_tokens for timing in good)
    samples: dict[str, list[float]] = {
        "ttft": [timing.ttft for timing in good],
        "tpot": [tpot for timing in good if (tpot := timing.tpot) is not None],
        "itl": [itl for timing in good for itl in timing.itls],
        "e2e": [timing.e2e for timing in good],
    }
    met = sum(objectives.met_by(timing.ttft, timing.tpot) for timing in good)
    return {
        "requests": len(timings),
        "failed": len(timings) - len(good),
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_second": _rate(len(good), seconds),
        "output_tokens_per_second": _rate(output_tokens, seconds),
        "total_tokens_per_second": _rate(prompt_tokens + output_tokens, seconds),
        "goodput_requests_per_second": _rate(met, seconds),
        **{f"{name}_ms": _statistics(values) for name, values in samples.items()},
    }


def summary_text(summary: dict[str, Any]) -> str:
    """A summary as a table."""
    lines = [
        f"  requests {summary['requests']}, failed {summary['failed']}, "
        f"{summary['seconds']:.2f} s, {summary['prompt_tokens']:,} prompt tokens, "
        f"{summary['output_tokens']:,} output tokens",
        f"  {summary['output_tokens_per_second']:,.1f} output tokens/s, "
        f"{summary['total_tokens_per_second']:,.1f} total tokens/s, "
        f"{summary['requests_per_second']:.2f} requests/s, "
        f"goodput {summary['goodput_requests_per_second']:.2f} requests/s",
        "           " + "".join(f"{name:>11}" for name in ("mean", "median", "p90", "p99")),
    ]
    for name in _LATENCIES:
        values = summary[f"{name}_ms"].values()
        lines.append(f"  {name.upper():<4} (ms)" + "".join(f"{value:11.2f}" for value in values))
    return "\n".join(lines)


def _statistics(seconds: list[float]) -> dict[str, float]:
    """Milliseconds; zeros without samples."""
    import numpy as np  # here, so that commands that measure nothing start faster

    values = np.array(seconds or [0.0]) * 1e3
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p90": float(np.percentile(values, 90)),
        "p99": float(np.percentile(values, 99)),
    }


def _span(timings: list[Timing]) -> float:
    if not timings:
        return 0.0
    return max(t.started + t.e2e for t in timings) - min(t.started for t in timings)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
