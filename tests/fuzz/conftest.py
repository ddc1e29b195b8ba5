"""The number of inputs of the fuzz tests, and the processes that receive them.

PAGEWIRE_FUZZ_INPUTS is the number of inputs over all tests here; the default is small.
"""

import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.processes.stack_process import RunningStack, running_stack
from support.processes.worker_process import WorkerProcess, worker_process

TOTAL = int(os.environ.get("PAGEWIRE_FUZZ_INPUTS", "3000"))
# Percent of all inputs.
SHARES = {
    "schemathesis": 3,
    "http bodies": 25,
    "http bytes": 13,
    "grpc Inference": 20,
    "grpc Inference with keys": 10,
    "grpc Worker": 15,
    "detokenizers": 8,
    "server-sent events": 7,
    "outputs": 8,
}
COUNTS: dict[str, Counter[str]] = {}


@pytest.fixture
def inputs() -> Callable[[str], int]:
    """Returns a function: name of a fuzz test to its number of inputs."""
    return lambda name: max(1, TOTAL * SHARES[name] // 100)


@pytest.fixture
def tally() -> Callable[[str], Counter[str]]:
    """Returns a function: name of a fuzz test to its counter of inputs by outcome."""
    return lambda name: COUNTS.setdefault(name, Counter())


@pytest.fixture(scope="package")
def stack() -> Iterator[RunningStack]:
    """A stack with short sequences, so that answers are short. No process may end or log a
    traceback."""
    with running_stack("--max-model-len", "48", "--openapi", "--log-level", "warning") as stack:
        pids = {kind: stack.pids(kind) for kind in ("gateway", "scheduler", "worker")}
        yield stack
        assert {kind: stack.pids(kind) for kind in pids} == pids, "".join(stack.log)
    assert "Traceback" not in "".join(stack.log), "".join(stack.log)


@pytest_asyncio.fixture
async def worker(tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    """A worker that may not end or log a traceback."""
    with worker_process(tmp_path, "embedded", max_model_len=48, log_level="warning") as process:
        await process.until_listening()
        yield process
        assert process.process.poll() is None, process.log
        assert "Traceback" not in process.log, process.log


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not COUNTS:
        return
    terminalreporter.section("fuzzed inputs")
    for name, outcomes in COUNTS.items():
        counts = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
        terminalreporter.line(f"{name}: {outcomes.total()} ({counts})")
    terminalreporter.line(f"in all: {sum(c.total() for c in COUNTS.values())}")
