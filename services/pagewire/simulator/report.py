"""The figures of a replay: for the whole, and over time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewire.objectives import Objectives
from pagewire.scheduler.core.batching.cached_prefix import Restart
from pagewire.simulator.recording import Recording, RequestRecord
from pagewire.simulator.trace import HASHED_TOKENS


def summarize(recording: Recording, objectives: Objectives) -> dict[str, Any]:
    """The figures of a whole replay; rates are averages over it, latencies in milliseconds."""
    finished = recording.finished
    seconds = recording.seconds
    prompt_tokens = sum(request.input_length for request in finished)
    output_tokens = sum(request.output_length for request in finished)
    cached_tokens = sum(request.cached_tokens for request in finished)
    loaded_tokens = sum(request.loaded_tokens for request in finished)
    waits = [r.admitted - r.arrival for r in finished if r.admitted is not None]
    met = sum(objectives.met_by(request.ttft, request.tpot) for request in finished)
    return {
        "requests": len(recording.requests),
        "finished": len(finished),
        "refused": recording.refused,
        "seconds": seconds,
        "steps": recording.steps,
        "output_tokens_per_second": output_tokens / seconds,
        "prompt_tokens_per_second": prompt_tokens / seconds,
        "requests_per_second": len(finished) / seconds,
        "goodput_requests_per_second": met / seconds,
        "ttft_ms": percentiles([request.ttft for request in finished]),
        "tpot_ms": percentiles([t for request in finished if (t := request.tpot) is not None]),
        "block_hit_rate": block_hit_rate(finished),
        "token_hit_rate": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "host_hit_rate": loaded_tokens / prompt_tokens if prompt_tokens else 0.0,
        "device_utilization": recording.busy_seconds / (seconds * recording.workers),
        **kv_use(recording),
        "preemptions": recording.preemptions,
        "preempted_returns": {kind.value: recording.restarts[kind] for kind in Restart},
        "saved_blocks": recording.saved_blocks,
        "loaded_blocks": recording.loaded_blocks,
        "longest_wait_seconds": max(waits, default=0.0),
        "longest_pause_seconds": recording.longest_pause,
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; zeros without values."""
    values = np.array(seconds or [0.0]) * 1e3
    found = {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)}
    return {"mean": float(values.mean()), **found}


def block_hit_rate(requests: list[RequestRecord]) -> float | None:
    """The share of the trace's hashed blocks whose tokens were all cached.

    None if the trace has no hashes. One token of a sequence is always computed. So the last hashed
    block of a request is never counted if the prompt ends with it.
    """
    total = sum(request.hash_blocks for request in requests)
    if not total:
        return None
    return sum(request.cached_tokens // HASHED_TOKENS for request in requests) / total


def kv_use(recording: Recording) -> dict[str, float]:
    """Means over time. "Under pressure": while requests wait. Waste is a share of used blocks."""
    used = _column(recording, "used_blocks")
    waiting = _column(recording, "waiting") > 0
    places = used.sum() * recording.block_size
    share = used / recording.total_blocks
    return {
        "kv_utilization": float(share.mean()) if len(share) else 0.0,
        "kv_utilization_under_pressure": float(share[waiting].mean()) if waiting.any() else 0.0,
        "seconds_under_pressure": float(waiting.sum() * sample_interval(recording)),
        "kv_waste": float(_column(recording, "wasted_tokens").sum() / places) if places else 0.0,
    }


def sample_interval(recording: Recording) -> float:
    """Seconds between two samples; 0 with fewer than two."""
    return recording.samples[1].time if len(recording.samples) > 1 else 0.0


def over_time(recording: Recording, bins: int = 120) -> dict[str, list[float | None]]:
    """Curves over the replay, in bins of equal length; None if a bin has no value.

    Latencies and hit rates are by the arrival of requests, all other curves by time.
    """
    edges = np.linspace(0, recording.seconds, bins + 1)
    width = edges[1]
    finished = recording.finished
    bin_of = np.minimum(
        np.array([r.arrival for r in finished]) // width if finished else np.zeros(0), bins - 1
    )
    requests: list[list[RequestRecord]] = [[] for _ in range(bins)]
    for request, index in zip(finished, bin_of.astype(int).tolist(), strict=True):
        requests[index].append(request)

    def latency(of: str, percentile: float) -> list[float | None]:
        values = [[v for r in rs if (v := getattr(r, of)) is not None] for rs in requests]
        return [float(np.percentile(vs, percentile)) * 1e3 if vs else None for vs in values]

    times = _column(recording, "time")

    def state(name: str) -> NDArray[np.float64]:
        return np.interp(edges[1:], times, _column(recording, name))

    def rate(name: str) -> list[float | None]:
        counts = np.interp(edges, times, _column(recording, name))
        found: list[float | None] = (np.diff(counts) / width).tolist()
        return found

    def share(part: str, of: str) -> list[float | None]:
        sums = [
            (sum(getattr(r, part) for r in rs), sum(getattr(r, of) for r in rs)) for rs in requests
        ]
        return [a / b if b else None for a, b in sums]

    return {
        "seconds": edges[1:].tolist(),
        "ttft_ms_p50": latency("ttft", 50),
        "ttft_ms_p99": latency("ttft", 99),
        "tpot_ms_p50": latency("tpot", 50),
        "tpot_ms_p99": latency("tpot", 99),
        "token_hit_rate": share("cached_tokens", "input_length"),
        "output_tokens_per_second": rate("output_tokens"),
        "device_utilization": [
            None if value is None else value / recording.workers for value in rate("busy_seconds")
        ],
        "kv_utilization": (state("used_blocks") / recording.total_blocks).tolist(),
        "running": state("running").tolist(),
        "waiting": state("waiting").tolist(),
    }


def _column(recording: Recording, name: str) -> NDArray[np.float64]:
    return np.array([getattr(sample, name) for sample in recording.samples], np.float64)
