"""Goodput and refusals at ten times the sustainable load.

    python benchmarks/overload.py [--seconds 60] [--factor 10] [--output FILE.jsonl]

A gateway, a scheduler and two simulated workers run as separate processes. The workers are slow, so
that the devices are the limit and not this machine's CPU. One more process sends streamed
completions with Poisson arrivals. It first tries rates around the workers' capacity; the highest
goodput is the peak. Then it sends `factor` times the rate of that peak, then the peak's rate again.
Goodput counts the requests that end within a phase, after its first 1.5 s, and meet both
objectives.

The services run with their default settings, except that requests wait for at most 1 s, or
`--max-waiting-seconds`: the objective is a time to first token of 2 s.

The sender times refusals when it reads them, but it shares this machine's cores with the services.
So there are two more measurements: at the gateway, from a request's head to the end of its answer,
and the time that each process was ready to run without a core. If a request was sent late, or the
sender waited to read, the sender itself was the cause.

Exits with status 1 when a target is missed: goodput under overload at least 90 % of its peak,
every refusal a 429 with a Retry-After, 99 % of them within 50 ms, and afterwards no open request,
no used block and no process grown by more than a tenth.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pagewire.bench.control_load import cpu_seconds
from pagewire.bench.http import run_plans
from pagewire.bench.http_load import LoadPlan, Timing
from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.cli.launch.launch import quiet
from pagewire.cli.launch.ports import free_port
from pagewire.cli.launch.supervisor import Service, Supervisor, running
from pagewire.cli.settings.settings import arguments
from pagewire.config import GatewayConfig, SchedulerConfig, SimulatedWorkerConfig
from pagewire.objectives import Objectives
from pagewire.rpc.transport import open_channel
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1.inference_pb2_grpc import InferenceStub

WORKERS = 2
SLOTS = 8
INPUT_WORDS = 24
OUTPUT_TOKENS = 16
# A step of 8 rows then lasts 40 ms, which allows about 20 requests a second.
SPEEDUP = 0.1
# Multiples of CAPACITY to try for the peak.
TRIED = "0.7,0.85,1,1.15"
CAPACITY = 20.0
# Not counted in a phase: requests that end then began under the previous load.
WARM_UP_SECONDS = 1.5
REFUSED_WITHIN_MS = 50.0


@dataclass(frozen=True, slots=True)
class Stack:
    """The running services and their addresses."""

    supervisor: Supervisor
    url: str
    grpc_address: str
    metrics_url: str

    def cpu_seconds(self) -> dict[str, float]:
        """The CPU seconds of each process so far."""
        return {name: cpu_seconds(pid) for name, pid in self.supervisor.pids.items()}

    def waited_seconds(self) -> dict[str, float]:
        """How long each process was ready to run but had no core."""
        return {name: waited_seconds(pid) for name, pid in self.supervisor.pids.items()}

    async def refusals(self) -> dict[str, int]:
        """The gateway's refusals so far, by upper bound in seconds, cumulatively."""
        text = await asyncio.to_thread(fetch, self.metrics_url)
        found = re.findall(
            r'^pagewire_gateway_refusal_seconds_bucket\{le="(\S+)"\} (\S+)$', text, re.M
        )
        return {bound: int(float(count)) for bound, count in found}

    def resident_mib(self) -> dict[str, float]:
        """Memory of each process."""
        return {name: resident_mib(pid) for name, pid in self.supervisor.pids.items()}


def main() -> None:
    given = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="pagewire-") as folder:
        result = asyncio.run(measure(given, Path(folder)))
    missed = misses(result)
    if given.output is not None:
        figures = figures_of({**result, "targets_missed": len(missed)})
        write_rows(given.output, figures, command_line())
    sys.exit("\n".join(missed) if missed else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--phase-seconds", type=float, default=15.0, help="of each other phase")
    parser.add_argument("--factor", type=float, default=10.0, help="overload over the peak's rate")
    parser.add_argument("--tried", default=TRIED, help="rates of the search, of 20 a second")
    parser.add_argument("--slo-ttft-ms", type=float, default=2000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=100.0)
    parser.add_argument("--max-waiting-seconds", type=float, default=1.0, help="of the scheduler")
    parser.add_argument("--output", type=Path, help="file for the figures, JSON lines")
    return parser.parse_args()


async def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All phases on one stack."""
    objectives = Objectives(given.slo_ttft_ms, given.slo_tpot_ms)
    stack = make_stack(folder, given.max_waiting_seconds)

    async def phase(name: str, rate: float, seconds: float) -> dict[str, Any]:
        plan = LoadPlan(
            url=stack.url,
            model="embedded",
            output_tokens=OUTPUT_TOKENS,
            requests=round(rate * seconds),
            input_words=INPUT_WORDS,
            concurrency=None,
            request_rate=rate,
            seed=round(rate * 1000),
        )
        cpu, waited = stack.cpu_seconds(), stack.waited_seconds()
        refusals = await stack.refusals()
        timings = await asyncio.to_thread(run_plans, [plan])
        found = {
            **summarize(timings, objectives, rate, seconds),
            "gateway_refusals_by_bound": difference(await stack.refusals(), refusals),
            "cpu_seconds": difference(stack.cpu_seconds(), cpu),
            "waited_for_a_core_seconds": difference(stack.waited_seconds(), waited),
        }
        print(line(name, found), flush=True)
        return found

    async with running(stack.supervisor):
        tried = [
            await phase("search", CAPACITY * float(share), given.phase_seconds)
            for share in given.tried.split(",")
        ]
        peak = max(tried, key=lambda found: found["goodput_per_second"])
        before = stack.resident_mib()
        overload = await phase("overload", given.factor * peak["offered_per_second"], given.seconds)
        after_overload = await phase("after", peak["offered_per_second"], given.phase_seconds)
        left = await left_over(stack)
        after = stack.resident_mib()
    return {
        "objectives": {"ttft_ms": given.slo_ttft_ms, "tpot_ms": given.slo_tpot_ms},
        "goodput_of_peak": overload["goodput_per_second"] / peak["goodput_per_second"],
        "peak": peak,
        "overload": overload,
        "after": after_overload,
        "tried": tried,
        "left_over": left,
        "resident_mib": {name: {"before": before[name], "after": after[name]} for name in before},
    }


def make_stack(folder: Path, max_waiting_seconds: float) -> Stack:
    """Two workers, a scheduler, a gateway; defaults except for the bound of the wait."""
    workers = [
        SimulatedWorkerConfig(
            worker_address=f"unix:{folder}/worker-{index}",
            served_model_name="embedded",
            speedup=SPEEDUP,
            num_slots=SLOTS,
            num_blocks=512,
        )
        for index in range(WORKERS)
    ]
    scheduler = SchedulerConfig(
        workers=",".join(worker.worker_address for worker in workers),
        served_model_name="embedded",
        grpc_port=free_port(),
        max_waiting_seconds=max_waiting_seconds,
    )
    address = f"127.0.0.1:{scheduler.grpc_port}"
    gateway = GatewayConfig(
        schedulers=address,
        port=free_port(),
        gateway_metrics_port=free_port(),
    )
    url = f"http://127.0.0.1:{gateway.port}"
    tiers = (
        [
            service(f"worker-{index}", "simulated-worker", worker, worker.worker_address)
            for index, worker in enumerate(workers)
        ],
        [service("scheduler", "scheduler", scheduler, address)],
        [service("gateway", "gateway", gateway, f"{url}/readyz")],
    )
    metrics_url = f"http://127.0.0.1:{gateway.gateway_metrics_port}/metrics"
    return Stack(Supervisor(tiers, quiet), url, address, metrics_url)


def service(name: str, command: str, config: Any, health: str) -> Service:
    flags = arguments(replace(config, drain_timeout=0.0))
    return Service(name, (sys.executable, "-m", "pagewire.cli.main", command, *flags), health, 10.0)


def summarize(
    timings: list[Timing], objectives: Objectives, rate: float, seconds: float
) -> dict[str, Any]:
    """The outcomes of the requests of one phase."""
    began = min(timing.started for timing in timings)
    served = [timing for timing in timings if timing.error is None]
    refused = [timing for timing in timings if timing.status == 429]
    good = [timing for timing in served if objectives.met_by(timing.ttft, timing.tpot)]
    first, last = began + WARM_UP_SECONDS, began + seconds
    in_time = [timing for timing in good if first <= timing.started + timing.e2e <= last]
    others = [t.error for t in timings if t.error is not None and t.status != 429]
    answered = np.array([timing.answered for timing in refused]) * 1e3
    late = np.array([timing.late for timing in timings]) * 1e3
    return {
        "offered_per_second": rate,
        "seconds": seconds,
        "requests": len(timings),
        "served": len(served),
        "served_within_objectives": len(good),
        "goodput_per_second": len(in_time) / (last - first),
        "ttft_ms": percentiles(np.array([timing.ttft for timing in served]) * 1e3),
        "tpot_ms": percentiles(np.array([timing.tpot or 0.0 for timing in served]) * 1e3),
        "refused": len(refused),
        "refused_ms": percentiles(answered),
        "refused_within_50_ms": float((answered < REFUSED_WITHIN_MS).mean()) if refused else 1.0,
        "sent_late_ms": percentiles(late),
        "retry_after_seconds": sorted({seconds_to_wait(timing) for timing in refused}),
        "other_failures": len(others),
        "first_other_failure": others[0] if others else None,
    }


def seconds_to_wait(timing: Timing) -> int:
    """The Retry-After of a refusal; 0, which misses the target, if it has no such number."""
    given = str(timing.retry_after)
    return int(given) if given.isdecimal() else 0


def percentiles(values: Any) -> dict[str, float]:
    """Percentiles and maximum; zeros if there are no values."""
    values = values if len(values) else np.zeros(1)
    return {
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }


async def left_over(stack: Stack) -> dict[str, float]:
    """The requests and blocks that the services still hold after a second."""
    await asyncio.sleep(1.0)
    async with open_channel(stack.grpc_address) as channel:
        load = await InferenceStub(channel).GetLoad(pb.GetLoadRequest())
    text = await asyncio.to_thread(fetch, stack.metrics_url)
    opened = re.search(r"^pagewire_gateway_open_requests (\S+)$", text, re.MULTILINE)
    assert opened is not None, "the gateway has no such metric"
    return {
        "scheduler_waiting": load.waiting,
        "scheduler_running": load.running,
        "scheduler_used_blocks": load.used_blocks,
        "gateway_open_requests": int(float(opened[1])),
        "ready_workers_missing": WORKERS - load.ready_workers,
    }


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The increase of each value."""
    return {name: value - before[name] for name, value in after.items()}


def fetch(url: str) -> str:
    """The body of a URL."""
    with urllib.request.urlopen(url) as response:
        return str(response.read().decode())


def misses(result: dict[str, Any]) -> list[str]:
    """The targets that were missed."""
    overload = result["overload"]
    found = []
    if result["goodput_of_peak"] < 0.9:
        found.append(f"goodput fell to {result['goodput_of_peak']:.0%} of its peak")
    if overload["refused_within_50_ms"] < 0.99:
        found.append(f"only {overload['refused_within_50_ms']:.1%} of the refusals took < 50 ms")
    found += [
        f"{name}: a request failed: {result[name]['first_other_failure']}"
        for name in ("peak", "overload", "after")
        if result[name]["other_failures"]
    ]
    if not overload["refused"]:
        found.append("nothing was refused, so there was no overload")
    wrong = [seconds for seconds in overload["retry_after_seconds"] if seconds not in range(1, 61)]
    if wrong:
        found.append(f"Retry-After was {wrong[0]}")
    found += [f"{what} is {count:g}" for what, count in result["left_over"].items() if count]
    for name, mib in result["resident_mib"].items():
        if mib["after"] > 1.1 * mib["before"]:
            found.append(f"{name} grew from {mib['before']:.0f} to {mib['after']:.0f} MiB")
    return found


def line(name: str, found: dict[str, Any]) -> str:
    refused, late = found["refused_ms"], found["sent_late_ms"]
    return (
        f"{name:<9} {found['offered_per_second']:6.1f} requests/s for {found['seconds']:g} s: "
        f"goodput {found['goodput_per_second']:5.2f}/s, TTFT p99 {found['ttft_ms']['p99']:.0f} ms; "
        f"{found['refused']} refused in p50 {refused['p50']:.1f}, p99 {refused['p99']:.1f}, "
        f"max {refused['max']:.1f} ms ({found['refused_within_50_ms']:.2%} below 50), sent late by "
        f"p99 {late['p99']:.1f}, max {late['max']:.1f} ms; CPU of "
        + ", ".join(
            f"{name} {used:.1f} s (waited {found['waited_for_a_core_seconds'][name]:.2f})"
            for name, used in found["cpu_seconds"].items()
        )
    )


def waited_seconds(pid: int) -> float:
    """How long the threads of a process were ready to run but had no core."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[1]) for task in tasks) / 1e9


def resident_mib(pid: int) -> float:
    """Memory of a process that is in RAM."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None, "the process is gone"
    return int(found[1]) / 1024


if __name__ == "__main__":
    main()
