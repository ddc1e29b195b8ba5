"""`pagewire bench control`: what the control plane costs, on simulated workers."""

import asyncio
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.bench.control_load import Load, Window, measure
from pagewire.bench.results import figures_of, write_rows
from pagewire.cli.launch.launch import quiet
from pagewire.cli.launch.ports import free_port
from pagewire.cli.launch.supervisor import Service, Supervisor, running
from pagewire.cli.settings.settings import arguments
from pagewire.config import SchedulerConfig, SimulatedWorkerConfig
from pagewire.simulator.addresses import addresses_of

_PROMPT = 64
# More than requests get together, and more than one gets, on any processor of today.
_MAX_TOKENS_PER_SECOND = 2_000_000
_MAX_STEPS_PER_SECOND = 12_000
# Of a measurement, beside its window: until all requests run, and until they have settled.
_MARGIN_SECONDS = 6.0
_VOCABULARY = 4096
_GRACE = 10.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load on some workers: `workers * running` requests, `running` on each."""

    name: str
    what: str
    workers: int
    running: int
    # Of the workers' steps over those of an H200 with Llama-3.1-8B; 0 is no time at all.
    speedup: float

    @property
    def total(self) -> int:
        """Requests that run at once."""
        return self.workers * self.running

    def tokens_for(self, seconds: float) -> int:
        """More than a request gets in that time: none ends while it is measured."""
        steps = 1000 if self.speedup else _MAX_STEPS_PER_SECOND
        return int(seconds * min(steps, _MAX_TOKENS_PER_SECOND / self.running))


SCENARIOS = (
    Scenario("throughput", "512 running, workers that take no time", 2, 256, 0),
    Scenario("busy", "256 running on one worker that takes no time", 1, 256, 0),
    Scenario("step", "a steady step of 256, at an H200's pace", 1, 256, 1),
    Scenario("few", "16 running, workers that take no time", 1, 16, 0),
    Scenario("many", "512 running on one worker that takes no time", 1, 512, 0),
    Scenario("alone", "one worker, 64 running, slow steps", 1, 64, 0.04),
    Scenario("together", "64 workers, 64 running on each, slow steps", 64, 64, 0.04),
)


_ALL = ",".join(scenario.name for scenario in SCENARIOS)


def control(
    only: Annotated[str, typer.Option(help="Scenarios, separated by commas.")] = _ALL,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each measurement.")] = 10.0,
    no_detokenize: Annotated[
        bool, typer.Option("--no-detokenize", help="Measure token ids only, without text.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
) -> None:
    """Measure a scheduler's throughput and CPU: simulated workers and this client in processes
    of their own, over gRPC."""
    known = {scenario.name: scenario for scenario in SCENARIOS}
    unknown = [name for name in only.split(",") if name not in known]
    if unknown:
        raise typer.BadParameter(
            f"{unknown[0]!r} is no scenario; give some of {', '.join(known)}", param_hint="--only"
        )
    windows = {}
    for name in only.split(","):
        windows[name] = asyncio.run(_run(known[name], seconds, not no_detokenize))
        print(_line(known[name], windows[name]), flush=True)
    summary = summarize(windows)
    for figure, value in summary.items():
        print(f"  {figure:<44} {value:>12,.2f}")
    if output is not None:
        command = f"pagewire bench control --only {only} --seconds {seconds:g}"
        command += " --no-detokenize" if no_detokenize else ""
        write_rows(output, figures_of(as_result(summary, windows)), command)


def as_result(summary: dict[str, float], windows: dict[str, Window]) -> dict[str, Any]:
    """The figures and what was counted in each scenario."""
    counted = {name: asdict(window) for name, window in windows.items()}
    for each in counted.values():
        each["cpu_seconds"] = each.pop("cpu")
    return {**summary, **counted}


def summarize(windows: dict[str, Window]) -> dict[str, float]:
    """The figures that the scenarios which ran allow."""
    found = {}
    if "throughput" in windows:
        found["output tokens/s at 512 running"] = windows["throughput"].tokens_per_second
    if "busy" in windows:
        found["scheduler ms of CPU a step of 256, in a row"] = _cpu_per_step_of_256(windows["busy"])
    if "step" in windows:
        # More than in a row: each step wakes threads that sleep and finds the caches cold.
        found["scheduler ms of CPU a step of 256, paced"] = _cpu_per_step_of_256(windows["step"])
    if "few" in windows and "many" in windows:
        few, many = _cpu_per_token(windows["few"]), _cpu_per_token(windows["many"])
        found["scheduler us of CPU a token, 16 running"] = few
        found["scheduler us of CPU a token, 512 running"] = many
        found["growth of CPU a token from 16 to 512, %"] = (many / few - 1) * 100
    if "alone" in windows and "together" in windows:
        alone, together = windows["alone"], windows["together"]
        found["step ms of a worker alone, median"] = alone.tpot_ms_median
        found["step ms among 64 workers, median"] = together.tpot_ms_median
        found["step ms among 64 workers, slowest"] = together.tpot_ms_max
        found["growth of the step among 64 workers, %"] = (
            together.tpot_ms_max / alone.tpot_ms_median - 1
        ) * 100
    return found


def _cpu_per_token(window: Window) -> float:
    """Microseconds of the scheduler."""
    return window.cpu["scheduler"] / window.tokens * 1e6


def _cpu_per_step_of_256(window: Window) -> float:
    """Milliseconds of the scheduler."""
    return _cpu_per_token(window) * 256 / 1e3


async def _run(scenario: Scenario, seconds: float, detokenize: bool) -> Window:
    with tempfile.TemporaryDirectory(prefix="pagewire-") as folder:
        max_tokens = scenario.tokens_for(seconds + _MARGIN_SECONDS)
        workers = SimulatedWorkerConfig(
            worker_address=f"unix:{folder}/worker",
            count=scenario.workers,
            speedup=scenario.speedup,
            num_slots=scenario.running,
            # Enough that nobody is preempted.
            num_blocks=scenario.running * (_PROMPT + max_tokens) // 16 + 1,
            max_model_len=_PROMPT + max_tokens,
        )
        addresses = addresses_of(workers.worker_address, workers.count)
        scheduler = SchedulerConfig(workers=",".join(addresses), grpc_port=free_port())
        address = f"127.0.0.1:{scheduler.grpc_port}"
        tiers = (
            [_service("workers", "simulated-worker", workers, addresses[-1])],
            [_service("scheduler", "scheduler", scheduler, address)],
        )
        supervisor = Supervisor(tiers, quiet)
        load = Load(scenario.total, _PROMPT, max_tokens, _VOCABULARY, detokenize)
        async with running(supervisor):
            return await measure(address, load, seconds, {**supervisor.pids, "client": os.getpid()})


def _service(name: str, command: str, config: Any, health: str) -> Service:
    # The stream is cut while all requests run: nothing is to be waited for.
    flags = arguments(replace(config, drain_timeout=0.0))
    return Service(
        name, (sys.executable, "-m", "pagewire.cli.main", command, *flags), health, _GRACE
    )


def _line(scenario: Scenario, window: Window) -> str:
    cpu = ", ".join(f"{name} {used / window.seconds:.0%}" for name, used in window.cpu.items())
    return (
        f"{scenario.name}: {scenario.what}\n"
        f"  {window.tokens_per_second:,.0f} tokens/s, {_cpu_per_token(window):.2f} us of scheduler "
        f"CPU a token; {window.tpot_ms_median:.2f} ms a token (slowest request "
        f"{window.tpot_ms_max:.2f}, p99 gap {window.gap_ms_p99:.2f}); CPU: {cpu}"
    )
