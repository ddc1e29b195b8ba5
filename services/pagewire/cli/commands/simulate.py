"""`pagewire simulate`: replays of a trace through the scheduler's core, on simulated workers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagewire.bench.comparisons import compare_preemption, compare_static
from pagewire.bench.replays import Setup, replay
from pagewire.bench.results import command_line, figures_of, write_file, write_rows
from pagewire.cli.errors import CommandError
from pagewire.cli.simulate_tables import print_preemption, print_runs, print_static

if TYPE_CHECKING:
    from pagewire.simulator.profile import Profile
    from pagewire.simulator.trace import TraceRequest

_PANELS = {
    "TTFT p99, ms": "ttft_ms_p99",
    "TPOT p99, ms": "tpot_ms_p99",
    "hit rate of prompt tokens": "token_hit_rate",
    "output tokens/s": "output_tokens_per_second",
    "device utilization": "device_utilization",
    "KV blocks in use, of all": "kv_utilization",
    "requests waiting": "waiting",
}


# Of all schedulers. A worker with the blocks of an H200 takes 2.6 MB, so these take 10.6 GB.
MAX_WORKERS = 4096


def simulate(
    trace: Annotated[
        Path,
        typer.Option(
            help="Trace of requests: CSV with TIMESTAMP,ContextTokens,GeneratedTokens, or .jsonl "
            "with timestamp, input_length, output_length, hash_ids."
        ),
    ],
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help=f"Simulated workers of each scheduler; {MAX_WORKERS} of all schedulers at most.",
        ),
    ] = 1,
    schedulers: Annotated[
        int,
        typer.Option(
            min=1, help="Schedulers; each request goes to one of them by a gateway's rule."
        ),
    ] = 1,
    policy: Annotated[
        str, typer.Option(help="Scheduling policy, as in `pagewire scheduler`.")
    ] = "fcfs",
    routing: Annotated[
        str,
        typer.Option(
            help="How a worker is chosen for a request. Several, separated by commas, are compared."
        ),
    ] = "prefix-aware",
    cache_blocks: Annotated[
        str | None,
        typer.Option(
            help="KV blocks of a worker, 0 for unlimited. Several, separated by commas, are "
            "compared. By default as many as the profile's device holds."
        ),
    ] = None,
    profile: Annotated[
        str, typer.Option(help="Device and model that are simulated.")
    ] = "h200-llama-3.1-8b",
    host_memory_gb: Annotated[
        str,
        typer.Option(
            help="Gigabytes of host memory of a worker for KV, 0 for none. Several, separated by "
            "commas, are compared."
        ),
    ] = "0",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block.")] = 16,
    num_slots: Annotated[
        int, typer.Option(min=1, help="Maximum number of sequences that run on a worker.")
    ] = 256,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of tokens computed in a step; by default the profile's."
        ),
    ] = None,
    memory_threshold: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Fraction of the KV blocks up to which requests are admitted."
        ),
    ] = 0.9,
    long_prompt_share: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1,
            help="Share of a worker's time that prompts of more than four steps get at least "
            "beside decodes; 1: no bound.",
        ),
    ] = 0.4,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Do not reuse KV of earlier requests.")
    ] = False,
    rate: Annotated[
        float,
        typer.Option(
            min=0, help="How many times faster than in the trace requests arrive; 0: all at once."
        ),
    ] = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Replay only so many of the first requests.")
    ] = None,
    ttft_slo_ms: Annotated[
        float, typer.Option(min=0, help="Longest TTFT, in milliseconds, for goodput.")
    ] = 2000.0,
    tpot_slo_ms: Annotated[
        float, typer.Option(min=0, help="Longest TPOT, in milliseconds, for goodput.")
    ] = 50.0,
    compare_static: Annotated[
        bool,
        typer.Option(
            "--compare-static",
            help="Compare continuous with static batching: all requests at once on one worker, "
            "with the same batch limit. Also measure KV utilization with a fourth of the memory "
            "that the batch needs.",
        ),
    ] = False,
    compare_preemption: Annotated[
        bool,
        typer.Option(
            "--compare-preemption",
            help="Compare preemption, by recompute and with host memory, with a queue that admits "
            "a request when its whole output fits: all requests at once on one worker, with a "
            "fourth of the memory that the batch needs.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="SVG file to plot the figures over time to.")
    ] = None,
) -> None:
    """Replay a trace through the scheduling core, on simulated workers with a virtual clock."""
    from pagewire.objectives import Objectives
    from pagewire.simulator.profile import load_profile
    from pagewire.simulator.report import over_time, summarize
    from pagewire.simulator.trace import ideal_block_hit_rate

    total = workers * schedulers
    if total > MAX_WORKERS:
        raise CommandError(
            f"--workers {workers} with --schedulers {schedulers} are {total} simulated workers; "
            f"give {MAX_WORKERS} at most, as each takes some megabytes of memory"
        )
    try:
        loaded = _read(trace, requests, rate)
        device = load_profile(profile)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    setup = Setup(
        profile=profile,
        workers=workers,
        schedulers=schedulers,
        policy=policy,
        routing="",
        cache_blocks=device.blocks(block_size),
        block_size=block_size,
        num_slots=num_slots,
        max_num_batched_tokens=max_num_batched_tokens or device.max_num_batched_tokens,
        memory_threshold=memory_threshold,
        long_prompt_share=long_prompt_share,
        prefix_caching=not no_prefix_caching,
    )
    if schedulers > 1 and (compare_static or compare_preemption):
        raise CommandError("--schedulers: a comparison has one; leave it out")
    if compare_static and compare_preemption:
        raise CommandError("give one of --compare-static and --compare-preemption")
    host_sizes = _gigabytes(host_memory_gb)
    if compare_static or compare_preemption:
        if len(host_sizes) > 1:
            raise CommandError("--host-memory-gb: a comparison takes one size")
        setup = replace(setup, routing="least-loaded", host_memory_gb=host_sizes[0])
        result = _compare(loaded, setup, device, compare_static, as_json)
        if output is not None:
            write_rows(output, figures_of(result), command_line())
        return
    sizes = _sizes(cache_blocks) or [setup.cache_blocks]
    setups = [
        replace(setup, routing=name.strip(), cache_blocks=size, host_memory_gb=host)
        for size in sizes
        for host in host_sizes
        for name in routing.split(",")
    ]
    objectives = Objectives(ttft_slo_ms, tpot_slo_ms)
    ideal = ideal_block_hit_rate(loaded)
    runs, curves = {}, {}
    for each in setups:
        recording = replay(loaded, each, device)
        runs[each.name] = summarize(recording, objectives)
        if plot is not None:
            curves[each.name] = over_time(recording)
    if as_json:
        print(json.dumps({"ideal_block_hit_rate": ideal, "runs": runs}, indent=2))
    else:
        print_runs(f"{trace.name}, {len(loaded):,} requests", ideal, runs)
    if output is not None:
        write_rows(output, figures_of({"ideal_block_hit_rate": ideal, **runs}), command_line())
    if plot is not None:
        _plot(plot, f"{trace.name}: {workers} workers, {profile}, {policy}", curves)


def _compare(
    requests: "list[TraceRequest]", setup: Setup, device: "Profile", static: bool, as_json: bool
) -> dict[str, Any]:
    """Runs one of the two comparisons and prints it."""
    if static:
        result, show = compare_static(requests, setup, device), print_static
    else:
        result, show = compare_preemption(requests, setup, device), print_preemption
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return result


def _read(path: Path, count: int | None, rate: float) -> "list[TraceRequest]":
    from pagewire.simulator.trace import read_trace

    requests = read_trace(path)[:count]
    return [replace(r, arrival=r.arrival / rate if rate else 0.0) for r in requests]


def _gigabytes(text: str) -> list[float]:
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.replace(".", "", 1).isdecimal()]
    if wrong:
        raise typer.BadParameter(
            f"{wrong[0]!r} is not a number of gigabytes; give 0 for none, or more",
            param_hint="--host-memory-gb",
        )
    return [float(part) for part in parts]


def _sizes(text: str | None) -> list[int]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdecimal() or part == "1"]
    if wrong:
        raise typer.BadParameter(
            f"{wrong[0]!r} is not a number of blocks; give 0 for unlimited, or at least 2",
            param_hint="--cache-blocks",
        )
    return [int(part) for part in parts]


def _plot(path: Path, title: str, curves: dict[str, dict[str, Any]]) -> None:
    from pagewire.simulator.plot import plot_svg

    panels = {
        label: {run: curve[key] for run, curve in curves.items()} for label, key in _PANELS.items()
    }
    seconds = {run: curve["seconds"] for run, curve in curves.items()}
    write_file(path, plot_svg(title, panels, seconds))
