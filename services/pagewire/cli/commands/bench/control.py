"""`pagewire bench control`: the cost of the control plane, with simulated workers."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.bench.control import SCENARIOS, Scenario, cpu_per_token, run_scenario, summarize
from pagewire.bench.control_load import Window
from pagewire.bench.results import figures_of, write_rows

_ALL = ",".join(scenario.name for scenario in SCENARIOS)


def control(
    only: Annotated[
        str, typer.Option(help="Scenarios to run, separated by commas; by default all.")
    ] = _ALL,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each measurement.")] = 10.0,
    no_detokenize: Annotated[
        bool, typer.Option("--no-detokenize", help="Request token ids only, without text.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
) -> None:
    """Measure the throughput and CPU time of a scheduler.

    Simulated workers, the scheduler and the client are processes of their own.
    """
    known = {scenario.name: scenario for scenario in SCENARIOS}
    names = [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(
            f"{unknown[0]!r} is not a scenario; give one or more of {', '.join(known)}",
            param_hint="--only",
        )
    windows = {}
    for name in names:
        windows[name] = asyncio.run(run_scenario(known[name], seconds, not no_detokenize))
        print(_line(known[name], windows[name]), flush=True)
    summary = summarize(windows)
    for figure, value in summary.items():
        print(f"  {figure:<44} {value:>12,.2f}")
    if output is not None:
        command = f"pagewire bench control --only {','.join(names)} --seconds {seconds:g}"
        command += " --no-detokenize" if no_detokenize else ""
        write_rows(output, figures_of(as_result(summary, windows)), command)


def as_result(summary: dict[str, float], windows: dict[str, Window]) -> dict[str, Any]:
    """The figures, and the counts of each scenario."""
    counted = {name: asdict(window) for name, window in windows.items()}
    for each in counted.values():
        each["cpu_seconds"] = each.pop("cpu")
    return {**summary, **counted}


def _line(scenario: Scenario, window: Window) -> str:
    cpu = ", ".join(f"{name} {used / window.seconds:.0%}" for name, used in window.cpu.items())
    return (
        f"{scenario.name}: {scenario.description}\n"
        f"  {window.tokens_per_second:,.0f} tokens/s, {cpu_per_token(window):.2f} us of scheduler "
        f"CPU a token; {window.tpot_ms_median:.2f} ms a token (slowest request "
        f"{window.tpot_ms_max:.2f}, p99 gap {window.gap_ms_p99:.2f}); CPU: {cpu}"
    )
