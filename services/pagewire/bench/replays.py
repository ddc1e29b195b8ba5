"""A replay of a trace and its parameters."""

import sys
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from pagewire.cli.errors import CommandError

if TYPE_CHECKING:
    from pagewire.scheduler.core.kv.host_tier import HostMemory
    from pagewire.scheduler.core.queue.policy import SchedulingPolicy
    from pagewire.simulator.profile import Profile
    from pagewire.simulator.recording import Recording
    from pagewire.simulator.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Setup:
    """The parameters of a replay."""

    profile: str
    workers: int  # of each scheduler
    policy: str
    routing: str
    cache_blocks: int  # of a worker; 0: as many as the whole trace can fill
    block_size: int
    num_slots: int
    max_num_batched_tokens: int
    memory_threshold: float
    long_prompt_share: float
    prefix_caching: bool
    host_memory_gb: float = 0.0  # host memory of a worker for KV
    whole_sequences: bool = False  # whether a request waits until its whole output fits
    schedulers: int = 1

    @property
    def name(self) -> str:
        """A name that distinguishes it from the other replays of a command."""
        host = f", {self.host_memory_gb:g} GB on the host" if self.host_memory_gb else ""
        return f"{self.routing}, {self.cache_blocks or 'unlimited'} blocks{host}"


def replay(requests: "list[TraceRequest]", setup: Setup, device: "Profile") -> "Recording":
    """Replays requests. CommandError if the router or policy does not exist, or no request fits."""
    from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
    from pagewire.scheduler.core.routing import ROUTERS
    from pagewire.simulator.fleet import run_fleet
    from pagewire.simulator.replay import Replay

    if setup.routing not in ROUTERS:
        raise CommandError(f"--routing {setup.routing!r}: give one of {', '.join(ROUTERS)}")
    limits = WorkerLimits(
        num_blocks=setup.cache_blocks or _blocks_of_all(requests, setup.block_size),
        block_size=setup.block_size,
        num_slots=min(setup.num_slots, setup.max_num_batched_tokens),
        max_num_batched_tokens=setup.max_num_batched_tokens,
        memory_threshold=setup.memory_threshold,
        long_prompt_share=setup.long_prompt_share,
        prefix_caching=setup.prefix_caching,
        whole_sequences=setup.whole_sequences,
        host=_host_memory(setup, device),
    )
    last = requests[-1].arrival
    progress = _Progress(setup.name, last)
    replays = [
        Replay(
            policy=_policy(setup.policy),
            router=ROUTERS[setup.routing](),
            limits=limits,
            num_workers=setup.workers,
            step_time=device.step_time,
            interval=max(last / 3600, 0.25),
            on_progress=progress,
        )
        for _ in range(setup.schedulers)
    ]
    if len(replays) == 1:
        recording = replays[0].run(requests)
    else:
        recording = run_fleet(replays, requests)
    if not recording.finished:
        raise CommandError(
            f"none of the {recording.refused} requests fits the {limits.num_blocks} KV blocks of a "
            "worker; give more with --cache-blocks or another --profile"
        )
    return recording


def _policy(name: str) -> "SchedulingPolicy":
    from pagewire.scheduler.policies import make_policy

    try:
        return make_policy(name)
    except ValueError as error:
        raise CommandError(f"--policy: {error}") from error


def _host_memory(setup: Setup, device: "Profile") -> "HostMemory":
    from pagewire.scheduler.core.kv.host_tier import NO_HOST_MEMORY, HostMemory

    blocks = device.host_blocks(setup.host_memory_gb, setup.block_size)
    if not blocks:
        return NO_HOST_MEMORY
    return HostMemory(blocks, *astuple(device.host_costs(setup.block_size)))


def _blocks_of_all(requests: "list[TraceRequest]", block_size: int) -> int:
    """Enough blocks for all requests on one worker, so that none is evicted."""
    tokens = (request.input_length + request.output_length for request in requests)
    return 2 + sum(-(-count // block_size) for count in tokens)


class _Progress:
    """Shows the progress on standard error, if that is a terminal."""

    def __init__(self, name: str, last: float) -> None:
        self._name, self._last = name, last
        self._shown = -1.0

    def __call__(self, seconds: float) -> None:
        if sys.stderr.isatty() and seconds >= self._shown + 60:
            self._shown = seconds
            minutes = f"{seconds / 60:.0f} of {self._last / 60:.0f} min"
            print(f"\r{self._name}: {minutes}", end="\r", file=sys.stderr, flush=True)
