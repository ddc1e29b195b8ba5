"""`pagewire simulate`: a trace through the scheduler's core, on simulated workers, in minutes."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagewire.cli.errors import CommandError
from pagewire.cli.results import write_json

if TYPE_CHECKING:
    from pagewire.simulator.profile import Profile
    from pagewire.simulator.recording import Recording
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


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a replay depends on besides the trace."""

    profile: str
    workers: int
    policy: str
    routing: str
    cache_blocks: int  # a worker's KV blocks; 0 is as many as the whole trace could fill
    block_size: int
    num_slots: int
    max_num_batched_tokens: int
    memory_threshold: float
    prefix_caching: bool

    @property
    def name(self) -> str:
        """What tells it from the other replays of a command."""
        return f"{self.routing}, {self.cache_blocks or 'unlimited'} blocks"


def simulate(
    trace: Annotated[
        Path,
        typer.Option(
            help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens, or .jsonl with timestamp, "
            "input_length, output_length, hash_ids."
        ),
    ],
    workers: Annotated[int, typer.Option(min=1, help="Simulated workers.")] = 1,
    policy: Annotated[str, typer.Option(help="Scheduling policy, as of the scheduler.")] = "fcfs",
    routing: Annotated[
        str, typer.Option(help="Choice of worker; several, separated by commas, are compared.")
    ] = "prefix-aware",
    cache_blocks: Annotated[
        str | None,
        typer.Option(
            help="KV blocks of a worker, 0 for unlimited; several, separated by commas, are "
            "compared. By default what the profile's device holds."
        ),
    ] = None,
    profile: Annotated[str, typer.Option(help="Device and model.")] = "h200-llama-3.1-8b",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a KV block.")] = 16,
    num_slots: Annotated[int, typer.Option(min=1, help="Most sequences on a worker.")] = 256,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens a step; by default the profile's.")
    ] = None,
    memory_threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the blocks up to which is admitted.")
    ] = 0.9,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Reuse no KV.")
    ] = False,
    rate: Annotated[
        float, typer.Option(min=0, help="Speed of the arrivals; 0 lets all come at once.")
    ] = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many requests.")
    ] = None,
    ttft_slo_ms: Annotated[float, typer.Option(min=0, help="For goodput.")] = 2000.0,
    tpot_slo_ms: Annotated[float, typer.Option(min=0, help="For goodput.")] = 50.0,
    compare_static: Annotated[
        bool,
        typer.Option(
            "--compare-static",
            help="All requests at once on one worker, against static batching at the same batch "
            "limit; and KV utilization with a fourth of the memory that the batch needs.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file for figures and curves.")] = None,
    plot: Annotated[Path | None, typer.Option(help="SVG file with the figures over time.")] = None,
) -> None:
    """Replay a trace through the real scheduling core: simulated workers, a virtual clock."""
    from pagewire.simulator.profile import load_profile
    from pagewire.simulator.report import Objectives

    try:
        loaded = _read(trace, requests, rate)
        device = load_profile(profile)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    setup = Setup(
        profile=profile,
        workers=workers,
        policy=policy,
        routing="",
        cache_blocks=device.blocks(block_size),
        block_size=block_size,
        num_slots=num_slots,
        max_num_batched_tokens=max_num_batched_tokens or device.max_num_batched_tokens,
        memory_threshold=memory_threshold,
        prefix_caching=not no_prefix_caching,
    )
    objectives = Objectives(ttft_slo_ms, tpot_slo_ms)
    if compare_static:
        result = _compare_static(loaded, replace(setup, routing="least-loaded"), device)
        _print_comparison(result, as_json)
        if output is not None:
            write_json(output, {"command": _command(), **result})
        return
    sizes = _sizes(cache_blocks) or [setup.cache_blocks]
    setups = [
        replace(setup, routing=name.strip(), cache_blocks=size)
        for size in sizes
        for name in routing.split(",")
    ]
    runs = {}
    curves = {}
    for each in setups:
        from pagewire.simulator.report import over_time, summarize

        recording = _replay(loaded, each, device)
        runs[each.name] = summarize(recording, objectives)
        curves[each.name] = over_time(recording)
    _print_runs(trace, loaded, runs, as_json)
    if output is not None:
        document = {
            "command": _command(),
            "trace": trace.name,
            "ideal_block_hit_rate": _ideal(loaded),
            "runs": runs,
            "over_time": curves,
        }
        write_json(output, document)
    if plot is not None:
        _plot(plot, f"{trace.name}: {workers} workers, {profile}, {policy}", curves)


def _read(path: Path, count: int | None, rate: float) -> "list[TraceRequest]":
    from pagewire.simulator.trace import read_trace

    requests = read_trace(path)[:count]
    return [replace(r, arrival=r.arrival / rate if rate else 0.0) for r in requests]


def _sizes(text: str | None) -> list[int]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdecimal() or part == "1"]
    if wrong:
        raise typer.BadParameter(
            f"{wrong[0]!r} is no number of blocks; give 0 for unlimited, or 2 and more",
            param_hint="--cache-blocks",
        )
    return [int(part) for part in parts]


def _replay(requests: "list[TraceRequest]", setup: Setup, device: "Profile") -> "Recording":
    from pagewire.scheduler.core.routing import ROUTERS
    from pagewire.scheduler.core.worker_limits import WorkerLimits
    from pagewire.scheduler.policies import make_policy
    from pagewire.simulator.replay import Replay

    if setup.routing not in ROUTERS:
        raise CommandError(f"--routing {setup.routing!r}: give one of {', '.join(ROUTERS)}")
    try:
        policy = make_policy(setup.policy)
    except ValueError as error:
        raise CommandError(f"--policy: {error}") from error
    limits = WorkerLimits(
        num_blocks=setup.cache_blocks or _blocks_of_all(requests, setup.block_size),
        block_size=setup.block_size,
        num_slots=min(setup.num_slots, setup.max_num_batched_tokens),
        max_num_batched_tokens=setup.max_num_batched_tokens,
        memory_threshold=setup.memory_threshold,
        prefix_caching=setup.prefix_caching,
    )
    last = requests[-1].arrival
    replay = Replay(
        policy=policy,
        router=ROUTERS[setup.routing](),
        limits=limits,
        num_workers=setup.workers,
        step_time=device.step_time,
        interval=max(last / 3600, 0.25),
        on_progress=_Progress(setup.name, last),
    )
    return replay.run(requests)


def _blocks_of_all(requests: "list[TraceRequest]", block_size: int) -> int:
    """Enough that nothing is ever evicted, on whichever worker."""
    tokens = (request.input_length + request.output_length for request in requests)
    return 2 + sum(-(-count // block_size) for count in tokens)


class _Progress:
    """One line on standard error, if that is a terminal."""

    def __init__(self, name: str, last: float) -> None:
        self._name, self._last = name, last
        self._shown = -1.0

    def __call__(self, seconds: float) -> None:
        if sys.stderr.isatty() and seconds >= self._shown + 60:
            self._shown = seconds
            minutes = f"{seconds / 60:.0f} of {self._last / 60:.0f} min"
            print(f"\r{self._name}: {minutes}", end="\r", file=sys.stderr, flush=True)


def _ideal(requests: "list[TraceRequest]") -> float | None:
    from pagewire.simulator.trace import ideal_block_hit_rate

    return ideal_block_hit_rate(requests)


def _compare_static(
    requests: "list[TraceRequest]", setup: Setup, device: "Profile"
) -> dict[str, Any]:
    """Throughputs at one batch limit, and KV use under pressure."""
    from pagewire.simulator.report import Objectives, summarize
    from pagewire.simulator.static_batching import run_static

    at_once = [replace(request, arrival=0.0) for request in requests]
    setup = replace(setup, workers=1)
    static = {
        padded: run_static(
            at_once, setup.num_slots, setup.max_num_batched_tokens, device.step_time, padded
        ).output_tokens_per_second
        for padded in (True, False)
    }
    objectives = Objectives(float("inf"), float("inf"))
    continuous = summarize(_replay(at_once, setup, device), objectives)
    mean = sum(r.input_length + r.output_length for r in requests) / len(requests)
    longest = max(r.input_length + r.output_length for r in requests)
    fourth = max(setup.num_slots * mean / 4, longest) / setup.block_size
    pressed_setup = replace(setup, cache_blocks=round(fourth) + 2)
    pressed = summarize(_replay(at_once, pressed_setup, device), objectives)
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


def _print_comparison(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(
        f"{result['requests']} requests at once, one worker, at most {result['batch_limit']} "
        "sequences\n"
        f"  continuous batching  {result['continuous_tokens_per_second']:10,.0f} output tokens/s\n"
        f"  static batching      {result['static_tokens_per_second']:10,.0f} output tokens/s: "
        f"continuous is {result['ratio']:.2f}x\n"
        f"  static, finished rows not computed "
        f"{result['static_without_finished_rows_tokens_per_second']:,.0f}: "
        f"{result['ratio_without_finished_rows']:.2f}x\n"
        f"With {result['pressure_blocks']} KV blocks, a fourth of what the batch needs\n"
        f"  KV utilization       {result['pressure_kv_utilization']:10.1%}\n"
        f"  KV waste             {result['pressure_kv_waste']:10.1%}\n"
        f"  throughput           {result['pressure_tokens_per_second']:10,.0f} output tokens/s, "
        f"{result['pressure_preemptions']} preemptions, {result['pressure_finished']} finished"
    )


def _print_runs(
    trace: Path, requests: "list[TraceRequest]", runs: dict[str, dict[str, Any]], as_json: bool
) -> None:
    ideal = _ideal(requests)
    if as_json:
        print(json.dumps({"ideal_block_hit_rate": ideal, "runs": runs}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    title = f"{trace.name}, {len(requests):,} requests"
    if ideal is not None:
        title += f"; ideal block hit rate {ideal:.1%}"
    table = Table(title=title)
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for label, cells in _rows(list(runs.values())):
        table.add_row(label, *cells)
    Console(width=None if sys.stdout.isatty() else 40 + 32 * len(runs)).print(table)


def _rows(runs: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    def row(label: str, form: str, *path: str) -> tuple[str, list[str]]:
        cells = []
        for run in runs:
            value: Any = run
            for part in path:
                value = value[part]
            cells.append("-" if value is None else format(value, form))
        return label, cells

    latencies = [
        row(f"{name} {p}, ms", ",.1f", f"{name.lower()}_ms", p)
        for name in ("TTFT", "TPOT")
        for p in ("mean", "p50", "p90", "p99")
    ]
    return [
        row("finished", ",", "finished"),
        row("refused as too large", ",", "refused"),
        row("seconds", ",.0f", "seconds"),
        row("output tokens/s", ",.0f", "output_tokens_per_second"),
        row("requests/s", ",.2f", "requests_per_second"),
        row("goodput, requests/s", ",.2f", "goodput_requests_per_second"),
        *latencies,
        row("block hit rate", ".1%", "block_hit_rate"),
        row("token hit rate", ".1%", "token_hit_rate"),
        row("device utilization", ".1%", "device_utilization"),
        row("KV utilization", ".1%", "kv_utilization"),
        row("  while requests wait", ".1%", "kv_utilization_under_pressure"),
        row("KV waste", ".2%", "kv_waste"),
        row("preemptions", ",", "preemptions"),
    ]


def _plot(path: Path, title: str, curves: dict[str, dict[str, Any]]) -> None:
    from pagewire.simulator.plot import plot_svg

    panels = {
        label: {run: curve[key] for run, curve in curves.items()} for label, key in _PANELS.items()
    }
    seconds = {run: curve["seconds"] for run, curve in curves.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plot_svg(title, panels, seconds), encoding="utf-8")


def _command() -> str:
    """The command line, files by their names alone."""
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return " ".join(["pagewire", *words])
