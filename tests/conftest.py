"""Settings that must be made before any test module is imported, and options of the chaos tests."""

import os
import signal
from collections import Counter

import pytest
import torch
from hypothesis import settings

# A shell that starts the tests in the background makes them and their children ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Local runs use the same examples each time. CI explores new ones; a failure prints the line that
# reproduces it. Hypothesis's limit of 200 ms an example is off: a busy machine exceeds it.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, print_blob=True, deadline=None)
settings.load_profile("explore" if os.environ.get("CI") else "repeat")

# gRPC reads this once. `pagewire.rpc` sets it too, but a test may import grpc first; a fork could
# then deadlock in gRPC's handlers.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

# Triton reads this once, when it is imported, and transformers imports it too.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for the size of the chaos tests; `make test` uses the defaults."""
    group = parser.getgroup("chaos")
    group.addoption("--requests", type=int, default=96, help="Requests of each chaos test.")
    group.addoption("--minutes", type=float, default=0.25, help="Duration of the soak test.")
    group.addoption("--soak-output", help="File for the figures of the soak test.")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what was skipped and how to run it."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    terminalreporter.section("what this run left out")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} skipped: {reason}")
    terminalreporter.line("fuzzers, chaos and soak ran small: make fuzz, make chaos, make soak")
