"""Comparisons of `pagewire simulate`: all requests of a trace at once on one worker."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pagewire.bench.replays import Setup, replay

if TYPE_CHECKING:
    from pagewire.simulator.profile import Profile
    from pagewire.simulator.trace import TraceRequest

_PREEMPTION_FIGURES = (
    "requests",
    "finished",
    "seconds",
    "output_tokens_per_second",
    "ttft_ms",
    "tpot_ms",
    "kv_utilization",
    "preemptions",
    "preempted_returns",
    "saved_blocks",
    "loaded_blocks",
    "longest_wait_seconds",
    "longest_pause_seconds",
)


def compare_static(
    requests: "list[TraceRequest]", setup: Setup, device: "Profile"
) -> dict[str, Any]:
    """Compares continuous with static batching at one batch limit. Also measures KV use
    with a fourth of the memory."""
    from pagewire.objectives import Objectives
    from pagewire.simulator.report import summarize
    from pagewire.simulator.static_batching import run_static

    at_once = [replace(request, arrival=0.0) for request in requests]
    setup = replace(setup, workers=1)
    static = {
        padded: run_static(
            at_once, setup.num_slots, setup.max_num_batched_tokens, device.step_time, padded
        ).output_tokens_per_second
        for padded in (True, False)
    }
    objectives = Objectives()
    continuous = summarize(replay(at_once, setup, device), objectives)
    pressed_setup = replace(setup, cache_blocks=_fourth_of_demand(requests, setup))
    pressed = summarize(replay(at_once, pressed_setup, device), objectives)
    throughput = continuous["output_tokens_per_second"]
    return {
        "batch_limit": setup.num_slots,
        "continuous_tokens_per_second": throughput,
        "static_tokens_per_second": static[True],
        "ratio": throughput / static[True],
        "static_without_finished_rows_tokens_per_second": static[False],
        "ratio_without_finished_rows": throughput / static[False],
        "pressure_blocks": pressed_setup.cache_blocks,
        "pressure_kv_utilization": pressed["kv_utilization_under_pressure"],
        "pressure_kv_waste": pressed["kv_waste"],
        "pressure_preemptions": pressed["preemptions"],
        "pressure_tokens_per_second": pressed["output_tokens_per_second"],
        "pressure_finished": pressed["finished"],
        "requests": len(requests),
    }


def compare_preemption(
    requests: "list[TraceRequest]", setup: Setup, device: "Profile"
) -> dict[str, Any]:
    """Compares preemption with a plain queue, on a worker with a fourth of the memory of its batch.

    The plain queue admits a request when all blocks for its whole output are free; only a replay
    has this number. The best of several settings counts. The other runs admit by the blocks needed
    so far, and preempt. They compute evicted KV again, or copy it back from the host.
    """
    from pagewire.objectives import Objectives
    from pagewire.simulator.report import summarize

    at_once = [replace(request, arrival=0.0) for request in requests]
    blocks = _fourth_of_demand(requests, setup)
    pressed = replace(setup, workers=1, cache_blocks=blocks)
    plain = [
        replace(
            pressed,
            whole_sequences=True,
            host_memory_gb=0.0,
            memory_threshold=1.0,
            num_slots=slots,
            max_num_batched_tokens=tokens,
        )
        for slots in (setup.num_slots, setup.num_slots // 2, setup.num_slots // 4)
        for tokens in (setup.max_num_batched_tokens, setup.max_num_batched_tokens // 4)
        if slots and tokens
    ]
    objectives = Objectives()

    def run(each: Setup) -> dict[str, Any]:
        figures = summarize(replay(at_once, each, device), objectives)
        named = {name: figures[name] for name in _PREEMPTION_FIGURES}
        return {
            "num_slots": each.num_slots,
            "max_num_batched_tokens": each.max_num_batched_tokens,
            "memory_threshold": each.memory_threshold,
            **named,
        }

    queues = [run(each) for each in plain]
    best = max(queues, key=lambda figures: figures["output_tokens_per_second"])
    compared = {
        "recompute": run(replace(pressed, host_memory_gb=0.0)),
        f"host tier of {setup.host_memory_gb:g} GB": run(pressed),
    }
    for figures in compared.values():
        ratio = figures["output_tokens_per_second"] / best["output_tokens_per_second"]
        figures["of_best_plain_queue"] = ratio
    return {
        "requests": len(requests),
        "blocks": blocks,
        "host_bytes_per_second": device.host_bytes_per_second,
        "host_bytes_source": device.host_bytes_source,
        "plain_queue": best,
        "plain_queue_settings": queues,
        **compared,
    }


def _fourth_of_demand(requests: "list[TraceRequest]", setup: Setup) -> int:
    """KV blocks for a fourth of a full batch, but at least for the longest request."""
    mean = sum(r.input_length + r.output_length for r in requests) / len(requests)
    longest = max(r.input_length + r.output_length for r in requests)
    return round(max(setup.num_slots * mean / 4, longest) / setup.block_size) + 2
