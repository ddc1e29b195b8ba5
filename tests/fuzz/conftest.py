"""How many inputs the fuzzers send, and what they fuzz.

PAGEWIRE_FUZZ_INPUTS is their number over all tests here, by default few enough for every run.
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
# Of all inputs, in hundredths.
SHARES = {
    "schemathesis": 3,
    "http bodies": 25,
    "http bytes": 13,
    "grpc Inference": 20,
    "grpc Inference with keys": 10,
    "grpc Worker": 15,
    "detokenizers": 8,
    "server-sent events": 7,
}
COUNTS: dict[str, Counter[str]] = {}


@pytest.fixture
def inputs() -> Callable[[str], int]:
    """How many inputs a fuzzer sends."""
    return lambda name: max(1, TOTAL * SHARES[name] // 100)


@pytest.fixture
def tally() -> Callable[[str], Counter[str]]:
    """Where a fuzzer counts its inputs by what became of them."""
    return lambda name: COUNTS.setdefault(name, Counter())


@pytest.fixture(scope="session")
def stack() -> Iterator[RunningStack]:
    """All processes, with a model whose sequences are short, so that answers are too."""
    with running_stack("--max-model-len", "48", "--openapi", "--log-level", "warning") as stack:
        pids = {kind: stack.pids(kind) for kind in ("gateway", "scheduler", "worker")}
        yield stack
        assert {kind: stack.pids(kind) for kind in pids} == pids, "".join(stack.log)
    assert "Traceback" not in "".join(stack.log), "".join(stack.log)


@pytest_asyncio.fixture
async def worker(tmp_path: Path) -> AsyncIterator[WorkerProcess]:
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
        told = ", ".join(f"{what} {count}" for what, count in outcomes.most_common())
        terminalreporter.line(f"{name}: {outcomes.total()} ({told})")
    terminalreporter.line(f"in all: {sum(c.total() for c in COUNTS.values())}")
