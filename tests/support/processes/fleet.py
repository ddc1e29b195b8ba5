"""A fleet: gateways, schedulers and workers in real processes that a test can kill or pause.

Worker N belongs to scheduler N modulo their number; each gateway has all schedulers. Connections
to workers and schedulers go through proxies that a test can cut. The supervisor of `pagewire run`
restarts processes that end.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from pagewire.cli.launch.ports import free_port
from pagewire.cli.launch.supervisor import Service, Supervisor
from pagewire.rpc.transport import open_channel
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.tcp_proxy import TcpProxy, tcp_proxies

PROGRAM = ("-m", "pagewire.cli.main")
TESTS = Path(__file__).parents[2]
SIMULATED = (
    "simulated-worker",
    "--profile=h200-qwen3-0.6b",
    "--speedup=0.2",  # steps of some milliseconds: a busy machine can keep up with four workers
    "--num-blocks=3000",
    "--num-slots=128",  # more than the clients of a test: one worker alone can run them all
    "--max-model-len=2048",
)


@dataclass
class Fleet:
    """Processes by name: worker-0, scheduler-0, gateway-0 and so on."""

    supervisor: Supervisor
    urls: list[str]
    schedulers: list[str]  # addresses, not those of the proxies
    metrics: dict[str, str]  # URLs by process
    proxies: list[TcpProxy] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    # If schedulers share workers: the file that lists the workers, and their addresses by name.
    worker_list: Path = Path()
    workers: dict[str, str] = field(default_factory=dict)

    def list_workers(self, *names: str) -> None:
        """Writes the list of shared workers: these, and no others."""
        new = self.worker_list.with_suffix(".new")
        new.write_text("".join(f"{self.workers[name]}\n" for name in names))
        new.replace(self.worker_list)

    def names(self, kind: str = "") -> list[str]:
        """The running processes of a kind."""
        return sorted(name for name in self.supervisor.pids if name.startswith(kind))

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a process, if it runs."""
        pid = self.supervisor.pids.get(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number is signal.SIGSTOP:
            self.stopped.add(name)
        else:
            self.stopped.discard(name)

    def stop_permanently(self, name: str) -> None:
        """Kills a process; the supervisor does not restart it."""
        self._restarter(name).cancel()
        self.signal(name, signal.SIGKILL)

    async def start_again(self, *names: str) -> None:
        """Restarts permanently stopped processes; returns when they are ready."""
        services = [s for s in self.supervisor._services() if s.name in names]
        await self.supervisor._start(services)
        for service in services:
            place = self.supervisor._services().index(service)
            restarter = asyncio.create_task(self.supervisor._restart(service))
            self.supervisor._restarters[place] = restarter

    async def until_restarted(self, *names: str, since: int) -> None:
        """Waits until processes that ended after line `since` of the log are ready again."""
        async with asyncio.timeout(90):
            for name in names:
                ready = f"{name} is ready again"
                while not any(line.endswith(ready) for line in self.log[since:]):
                    await asyncio.sleep(0.05)

    def _restarter(self, name: str) -> "asyncio.Task[None]":
        place = [service.name for service in self.supervisor._services()].index(name)
        return self.supervisor._restarters[place]

    @staticmethod
    def open_files(pid: int) -> int:
        """Number of descriptors of a process; OSError if it has ended."""
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    @staticmethod
    def resident(pid: int) -> int:
        """Resident bytes of a process; OSError if it has ended."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @staticmethod
    def peak_memory(pid: int) -> int:
        """The largest resident bytes of a process so far; OSError if it has ended."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        assert found is not None
        return 1024 * int(found[1])

    def samples(self, process: str) -> dict[str, float]:
        """All samples of a process's metrics, by name and labels."""
        with urllib.request.urlopen(f"{self.metrics[process]}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def metric(self, process: str, pattern: str) -> float:
        """The sum of the samples whose name and labels match a pattern."""
        found = self.samples(process)
        return sum(value for name, value in found.items() if re.fullmatch(pattern, name))

    async def loads(self) -> list[pb.Load | None]:
        """The load of each scheduler; None for a scheduler that does not answer."""
        found: list[pb.Load | None] = []
        for address in self.schedulers:
            async with open_channel(address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                try:
                    found.append(await stub.GetLoad(pb.GetLoadRequest(), timeout=3))
                except grpc.aio.AioRpcError:
                    found.append(None)
        return found

    async def is_idle(self, workers: int) -> bool:
        """Whether `workers` workers are ready, no request is open and no block is in use."""
        loads = await self.loads()
        if any(load is None for load in loads):
            return False
        if sum(load.ready_workers for load in loads if load is not None) != workers:
            return False
        return not any(
            load.running or load.waiting or load.used_blocks for load in loads if load is not None
        )


@contextlib.asynccontextmanager
async def running_fleet(
    workers: int,
    schedulers: int = 1,
    gateways: int = 1,
    worker_command: tuple[str, ...] = SIMULATED,
    scheduler_flags: tuple[str, ...] = (),
    gateway_flags: tuple[str, ...] = (),
    program: tuple[str, ...] = PROGRAM,
    failing: str = "",
    proxied: bool = True,
    shared: bool = False,
) -> AsyncIterator[Fleet]:
    """Starts a fleet, waits until it is ready, and ends it with SIGTERM.

    `program` holds the arguments with which Python runs the `pagewire` command. `failing` names a
    service, `worker` or `scheduler`, whose processes run `failing_services.py`. With `proxied` all
    connections between services pass through the test's process. With `shared` the schedulers share
    all workers, which a file lists.
    """
    with tempfile.TemporaryDirectory(prefix="pagewire-") as folder:
        sockets = [f"unix:{folder}/worker-{n}.sock" for n in range(workers)]
        ports = [free_port() for _ in range(schedulers)]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        metrics = {}
        async with (
            tcp_proxies(*sockets if proxied else ()) as to_workers,
            tcp_proxies(*addresses if proxied else ()) as to_schedulers,
        ):
            workers_at, schedulers_at = sockets, addresses
            if proxied:
                workers_at = [proxy.address for proxy in to_workers]
                schedulers_at = [proxy.address for proxy in to_schedulers]
            names = [f"worker-{n}" for n in range(workers)]
            addresses_of = dict(zip(names, workers_at, strict=True))
            worker_tier = []
            for n, socket in enumerate(sockets):
                metrics_port = free_port()
                metrics[f"worker-{n}"] = f"http://127.0.0.1:{metrics_port}"
                command = (
                    *worker_command,
                    f"--worker-address={socket}",
                    f"--worker-metrics-port={metrics_port}",
                )
                worker_tier.append(_service(f"worker-{n}", program, command, socket, failing))
            scheduler_tier = []
            for n, port in enumerate(ports):
                metrics_port = free_port()
                metrics[f"scheduler-{n}"] = f"http://127.0.0.1:{metrics_port}"
                command = (
                    "scheduler",
                    f"--grpc-port={port}",
                    *_workers_of(n, schedulers, workers_at, f"{folder}/workers", shared),
                    f"--scheduler-metrics-port={metrics_port}",
                    *scheduler_flags,
                )
                scheduler_tier.append(
                    _service(f"scheduler-{n}", program, command, addresses[n], failing)
                )
            gateway_tier, urls = [], []
            known = ",".join(schedulers_at)
            for n in range(gateways):
                port = free_port()
                urls.append(f"http://127.0.0.1:{port}")
                metrics_port = free_port()
                metrics[f"gateway-{n}"] = f"http://127.0.0.1:{metrics_port}"
                command = (
                    "gateway",
                    f"--port={port}",
                    f"--schedulers={known}",
                    f"--gateway-metrics-port={metrics_port}",
                    *gateway_flags,
                )
                gateway_tier.append(
                    _service(f"gateway-{n}", program, command, f"{urls[-1]}/readyz")
                )
            log: list[str] = []
            supervisor = Supervisor(
                (worker_tier, scheduler_tier, gateway_tier),
                lambda name, line: log.append(f"{name} | {line}"),
            )
            fleet = Fleet(supervisor, urls, addresses, metrics, [*to_workers, *to_schedulers], log)
            fleet.worker_list, fleet.workers = Path(folder) / "workers", addresses_of
            fleet.list_workers(*names)
            try:
                await supervisor.start()
                yield fleet
            finally:
                for name in list(fleet.stopped):
                    fleet.signal(name, signal.SIGCONT)
                await supervisor.stop()


def _workers_of(
    number: int, schedulers: int, workers: list[str], listed_in: str, shared: bool
) -> list[str]:
    """The flags that list a scheduler's workers."""
    if shared:
        return [f"--workers=file:{listed_in}", "--share-workers", "--rebalance-after=1"]
    return [f"--workers={','.join(workers[number::schedulers])}"]


def _service(
    name: str,
    program: tuple[str, ...],
    command: tuple[str, ...],
    health: str,
    failing: str = "",
) -> Service:
    environment: dict[str, str] = {}
    if failing and name.startswith(failing):
        program = ("-m", "support.processes.failing_services")
        environment["PAGEWIRE_TEST_FAILING"] = failing
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return Service(
        name=name,
        environment=environment,
        command=(sys.executable, *program, *command),
        health=health,
        grace=35.0,
    )
