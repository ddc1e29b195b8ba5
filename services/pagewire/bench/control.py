"""Loads on a scheduler in front of simulated workers, and the figures that follow from them."""

import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from pagewire.bench.control_load import Load, Window, measure
from pagewire.cli.launch.launch import quiet
from pagewire.cli.launch.ports import free_port
from pagewire.cli.launch.supervisor import Service, Supervisor, running
from pagewire.cli.settings.settings import arguments
from pagewire.config import SchedulerConfig, SimulatedWorkerConfig
from pagewire.simulator.addresses import addresses_of

_PROMPT_TOKENS = 64
# Upper bounds for any scheduler on any processor: tokens of all requests together, and tokens of
# one request. They determine a request's max_tokens.
_MAX_TOKENS_PER_SECOND = 2_000_000
_MAX_STEPS_PER_SECOND = 12_000
# Time before the measurement, until all requests run at a steady rate.
_MARGIN_SECONDS = 6.0
_VOCABULARY = 4096
_GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load of `running` requests on each of `workers` simulated workers."""

    name: str
    description: str
    workers: int
    running: int
    # The speed of steps relative to an H200 with Llama-3.1-8B; with 0 a step takes no time.
    speedup: float

    @property
    def total(self) -> int:
        """Requests that run at once."""
        return self.workers * self.running

    def tokens_for(self, seconds: float) -> int:
        """A max_tokens that no request reaches in this time, so that no request ends during the
        measurement."""
        steps = 1000 * self.speedup if self.speedup else _MAX_STEPS_PER_SECOND
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


async def run_scenario(
    scenario: Scenario,
    seconds: float,
    detokenize: bool,
    before: Callable[[], Awaitable[object]] | None = None,
) -> Window:
    """Starts simulated workers and a scheduler, and measures them under the scenario's load.

    `before` is awaited once all requests decode, before the measurement.
    """
    with tempfile.TemporaryDirectory(prefix="pagewire-") as folder:
        max_tokens = scenario.tokens_for(seconds + _MARGIN_SECONDS)
        workers = SimulatedWorkerConfig(
            worker_address=f"unix:{folder}/worker",
            count=scenario.workers,
            speedup=scenario.speedup,
            num_slots=scenario.running,
            # Enough that no request is preempted.
            num_blocks=scenario.running * (_PROMPT_TOKENS + max_tokens) // 16 + 1,
            max_model_len=_PROMPT_TOKENS + max_tokens,
        )
        addresses = addresses_of(workers.worker_address, workers.count)
        scheduler = SchedulerConfig(workers=",".join(addresses), grpc_port=free_port())
        address = f"127.0.0.1:{scheduler.grpc_port}"
        tiers = (
            [_service("workers", "simulated-worker", workers, addresses[-1])],
            [_service("scheduler", "scheduler", scheduler, address)],
        )
        supervisor = Supervisor(tiers, quiet)
        load = Load(scenario.total, _PROMPT_TOKENS, max_tokens, _VOCABULARY, detokenize)
        async with running(supervisor):
            pids = {**supervisor.pids, "client": os.getpid()}
            return await measure(address, load, seconds, pids, before)


def _service(
    name: str, command: str, config: SchedulerConfig | SimulatedWorkerConfig, health: str
) -> Service:
    # The measurement ends while all requests run; draining them has no use.
    flags = arguments(replace(config, drain_timeout=0.0))
    return Service(
        name, (sys.executable, "-m", "pagewire.cli.main", command, *flags), health, _GRACE_SECONDS
    )


def summarize(windows: Mapping[str, Window]) -> dict[str, float]:
    """The figures that follow from the scenarios that ran; `windows` is by scenario name."""
    found = {}
    if "throughput" in windows:
        found["output tokens/s at 512 running"] = windows["throughput"].tokens_per_second
    if "busy" in windows:
        found["scheduler ms of CPU a step of 256, in a row"] = _cpu_per_step_of_256(windows["busy"])
    if "step" in windows:
        # Higher than for steps without pauses: threads must wake up, and CPU caches are cold.
        found["scheduler ms of CPU a step of 256, paced"] = _cpu_per_step_of_256(windows["step"])
    if "few" in windows and "many" in windows:
        few, many = cpu_per_token(windows["few"]), cpu_per_token(windows["many"])
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


def cpu_per_token(window: Window) -> float:
    """Microseconds of the scheduler's CPU time for one output token."""
    return window.cpu["scheduler"] / window.tokens * 1e6


def _cpu_per_step_of_256(window: Window) -> float:
    """Milliseconds of the scheduler's CPU time for one step of 256 sequences."""
    return cpu_per_token(window) * 256 / 1e3
