"""Schedulers and workers up to a thousand: simulated, and as processes that share workers.

    python benchmarks/thousand_workers.py simulate --schedulers 1,4,16 --output FILE.jsonl
    python benchmarks/thousand_workers.py decode --schedulers 1,4,16 --output FILE.jsonl
    python benchmarks/thousand_workers.py share --sizes 2x64,2x1024 --output FILE.jsonl

`simulate` replays the same load for each of 64 workers, with a virtual clock, and reports the
throughput by number of schedulers. `decode` does the same with processes: 64 workers of each
scheduler decode at once, with steps slow enough for this machine to compute them all. `share`
starts schedulers that share idle workers, up to 64 in one process, then kills and restarts one
scheduler. It reports the time of each change until all workers are held, and held evenly, and the
cost of sharing while nothing changes.
"""

import argparse
import asyncio
import contextlib
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagewire.bench.control import Scenario, run_scenario
from pagewire.bench.control_load import Window, cpu_seconds
from pagewire.bench.replays import Setup, replay
from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.cli.launch.ports import free_port
from pagewire.objectives import Objectives
from pagewire.simulator.profile import load_profile
from pagewire.simulator.report import summarize
from pagewire.simulator.trace import TraceRequest

WORKERS = 64
PROFILE = "h200-llama-3.1-8b"
PER_PROCESS = 64
IDLE_SECONDS = 10.0
LIMIT_SECONDS = 240.0


def requests_for(workers: int, rate: float, seconds: float) -> list[TraceRequest]:
    """Evenly spaced arrivals, `rate` a second for each worker; no two prompts begin alike."""
    draw = random.Random(workers)
    return [
        TraceRequest(
            number,
            number / (rate * workers),
            draw.randint(200, 1000),
            draw.randint(64, 192),
            None,
        )
        for number in range(int(seconds * rate * workers))
    ]


def simulate(options: argparse.Namespace) -> list[Figure]:
    """Throughput and latencies of 64 workers for each scheduler, at the same load for each."""
    device = load_profile(PROFILE)
    rows: list[Figure] = []
    base = 0.0
    for schedulers in map(int, options.schedulers.split(",")):
        setup = Setup(
            profile=PROFILE,
            workers=WORKERS,
            schedulers=schedulers,
            policy="fcfs",
            routing="prefix-aware",
            cache_blocks=device.blocks(16),
            block_size=16,
            num_slots=256,
            max_num_batched_tokens=device.max_num_batched_tokens,
            memory_threshold=0.9,
            long_prompt_share=1.0,
            prefix_caching=True,
        )
        load = requests_for(schedulers * WORKERS, options.rate, options.seconds)
        began = time.process_time()
        recording = replay(load, setup, device)
        cpu = time.process_time() - began
        found = summarize(recording, Objectives())
        assert found["finished"] == len(load), "every request must end"
        name = f"{schedulers}x{WORKERS}"
        # While requests arrive: the rest afterwards runs on workers that empty.
        inside = [s for s in recording.samples if s.time <= options.seconds]
        tokens = inside[-1].output_tokens / inside[-1].time
        base = base or tokens / schedulers
        rows += [
            Figure(f"{name}/output_tokens_per_second", tokens, "tokens/s"),
            Figure(f"{name}/of_linear", tokens / schedulers / base, "ratio"),
            Figure(f"{name}/ttft_p99", found["ttft_ms"]["p99"], "ms"),
            Figure(f"{name}/tpot_p99", found["tpot_ms"]["p99"], "ms"),
            Figure(f"{name}/steps_per_second", found["steps"] / found["seconds"], "count"),
            Figure(f"{name}/core_cpu_a_step", cpu / found["steps"] * 1e6, "us"),
        ]
        show(rows[-6:])
    return rows


def decode(options: argparse.Namespace) -> list[Figure]:
    """Throughput of processes, 64 workers for each scheduler, all of them decoding."""
    rows: list[Figure] = []
    base = 0.0
    for schedulers in map(int, options.schedulers.split(",")):
        windows = asyncio.run(_decode_at_once(schedulers, options))
        name = f"{schedulers}x{WORKERS}/processes"
        tokens = sum(window.tokens_per_second for window in windows)
        base = base or tokens / schedulers
        steps = sum(window.messages / window.seconds for window in windows)
        client = max(window.cpu["client"] / window.seconds for window in windows)  # of all
        busy = client + sum(
            (window.cpu["workers"] + window.cpu["scheduler"]) / window.seconds for window in windows
        )
        rows += [
            Figure(f"{name}/output_tokens_per_second", tokens, "tokens/s"),
            Figure(f"{name}/of_linear", tokens / schedulers / base, "ratio"),
            Figure(f"{name}/tpot_median", max(each.tpot_ms_median for each in windows), "ms"),
            Figure(f"{name}/tpot_slowest", max(each.tpot_ms_max for each in windows), "ms"),
            Figure(f"{name}/messages_per_second", steps, "count"),
            Figure(f"{name}/busy_cores", busy, "count"),
        ]
        show(rows[-6:])
    return rows


async def _decode_at_once(schedulers: int, options: argparse.Namespace) -> list[Window]:
    """Measures all schedulers at the same time, once the last one is ready."""
    scenario = Scenario("workers", "", WORKERS, options.running, options.speedup)
    ready = asyncio.Barrier(schedulers)

    async def one() -> Window:
        return await run_scenario(scenario, options.seconds, False, ready.wait)

    return await asyncio.gather(*(one() for _ in range(schedulers)))


class Sharing:
    """Scheduler processes that share workers."""

    def __init__(self, folder: Path, schedulers: int, workers: int) -> None:
        self._folder = folder
        self._workers = workers
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._metrics = [free_port() for _ in range(schedulers)]

    def start(self, number: int) -> None:
        """Starts or restarts a scheduler."""
        words = ["scheduler", "--skip-tokenizer", "--share-workers", "--log-level=error"]
        words += [f"--workers=file:{self._folder}/workers", f"--grpc-port={free_port()}"]
        words += [f"--scheduler-metrics-port={self._metrics[number]}"]
        self.processes[number] = pagewire(*words)

    def held(self) -> list[int]:
        """The workers of each scheduler that answers, in ascending order."""
        found = []
        for number in self.processes:
            with contextlib.suppress(OSError):
                url = f"http://127.0.0.1:{self._metrics[number]}/metrics"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    text = answer.read().decode()
                match = re.search(r"^pagewire_scheduler_ready_workers (\S+)", text, re.MULTILINE)
                found.append(int(float(match[1])) if match else 0)
        return sorted(found)

    def until_even(self) -> float:
        """Seconds until all workers are held, in even shares."""
        began = time.monotonic()
        each, rest = divmod(self._workers, len(self.processes))
        want = [each] * (len(self.processes) - rest) + [each + 1] * rest
        return self._until(lambda held: held == want, began)

    def until_all_held(self) -> float:
        """Seconds until every worker is held."""
        return self._until(lambda held: sum(held) == self._workers, time.monotonic())

    def _until(self, reached: Any, began: float) -> float:
        while not reached(held := self.held()):
            if time.monotonic() - began > LIMIT_SECONDS:
                raise SystemExit(f"after {LIMIT_SECONDS:g} s the schedulers hold {held}")
            time.sleep(0.1)
        return time.monotonic() - began


@contextlib.contextmanager
def sharing(schedulers: int, workers: int) -> Iterator[Sharing]:
    """Simulated workers that listen, and schedulers that have just been started."""
    with tempfile.TemporaryDirectory(prefix="pagewire-") as name:
        folder = Path(name)
        made: list[subprocess.Popen[bytes]] = []
        fleet = Sharing(folder, schedulers, workers)
        try:
            addresses: list[str] = []
            for number in range(-(-workers // PER_PROCESS)):
                count = min(PER_PROCESS, workers - len(addresses))
                base = f"unix:{folder}/{number}"
                made.append(
                    pagewire(
                        "simulated-worker",
                        f"--worker-address={base}",
                        f"--count={count}",
                        "--num-blocks=64",
                        "--max-model-len=512",
                        "--num-slots=8",
                        "--log-level=error",
                    )
                )
                addresses += [base] if count == 1 else [f"{base}.{n}" for n in range(count)]
            sockets = [Path(address.removeprefix("unix:")) for address in addresses]
            while not all(socket.exists() for socket in sockets):
                time.sleep(0.1)
            (folder / "workers").write_text("\n".join(addresses))
            for number in range(schedulers):
                fleet.start(number)
            yield fleet
        finally:
            for process in [*fleet.processes.values(), *made]:
                process.kill()
                process.wait()


def share(options: argparse.Namespace) -> list[Figure]:
    """The time until workers are shared again after each change, and its cost."""
    rows: list[Figure] = []
    for size in options.sizes.split(","):
        schedulers, workers = map(int, size.split("x"))
        with sharing(schedulers, workers) as fleet:
            while len(fleet.held()) < schedulers:  # they listen
                time.sleep(0.1)
            even = fleet.until_even()
            pids = [process.pid for process in fleet.processes.values()]
            before = [cpu_seconds(pid) for pid in pids]
            time.sleep(IDLE_SECONDS)
            used = [cpu_seconds(pid) - cpu for pid, cpu in zip(pids, before, strict=True)]
            memory = max(resident(pid) for pid in pids)
            dead = fleet.processes.pop(0)
            dead.kill()
            dead.wait()
            taken_over = fleet.until_all_held()
            fleet.start(0)
            while len(fleet.held()) < schedulers:
                time.sleep(0.1)
            back = fleet.until_even()
        rows += [
            Figure(f"{size}/even_after_start", even, "s"),
            Figure(f"{size}/taken_over_after_kill", taken_over, "s"),
            Figure(f"{size}/even_after_return", back, "s"),
            Figure(f"{size}/idle_cpu_of_a_scheduler", 100 * max(used) / IDLE_SECONDS, "%"),
            Figure(f"{size}/memory_of_a_scheduler", memory / 2**20, "MiB"),
        ]
        show(rows[-5:])
    return rows


def pagewire(*words: str) -> subprocess.Popen[bytes]:
    """A `pagewire` process."""
    return subprocess.Popen([sys.executable, "-m", "pagewire.cli.main", *words])


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return 4096 * int(pages)


def show(rows: list[Figure]) -> None:
    """Prints figures as they arrive."""
    for row in rows:
        print(f"{row.name}: {row.value:,.3f} {row.unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    simulated = commands.add_parser("simulate")
    simulated.add_argument("--schedulers", default="1,4,16")
    simulated.add_argument("--rate", type=float, default=16.0, help="requests a second and worker")
    simulated.add_argument("--seconds", type=float, default=4.0, help="time in which they arrive")
    simulated.set_defaults(run=simulate)
    decoding = commands.add_parser("decode")
    decoding.add_argument("--schedulers", default="1,4,16")
    decoding.add_argument("--running", type=int, default=8, help="requests of each worker")
    decoding.add_argument("--speedup", type=float, default=0.005, help="of an H200's steps")
    decoding.add_argument("--seconds", type=float, default=60.0, help="time of a measurement")
    decoding.set_defaults(run=decode)
    shared = commands.add_parser("share")
    shared.add_argument("--sizes", default="2x64", help="schedulers x workers, with commas")
    shared.set_defaults(run=share)
    for each in (simulated, decoding, shared):
        each.add_argument("--output", type=Path, help="file for the figures, JSON lines")
    options = parser.parse_args()
    rows = options.run(options)
    if options.output is not None:
        write_rows(options.output, rows, command_line())


if __name__ == "__main__":
    main()
