"""What must hold before any test module is imported."""

import os
import signal
from collections import Counter

import pytest
import torch
from hypothesis import settings

# A shell that runs the tests in the background has them ignore SIGINT, and so would all that they
# start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On a developer's machine a run repeats the one before; CI explores anew, and a failure there comes
# with the line that reproduces it.
settings.register_profile("repeat", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile("explore" if os.environ.get("CI") else "repeat")

# Triton reads this once, when it is imported, and transformers imports it too.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The size of the chaos tests; the defaults are for every day."""
    group = parser.getgroup("chaos")
    group.addoption("--requests", type=int, default=120, help="Requests of each chaos test.")
    group.addoption("--minutes", type=float, default=0.25, help="How long the soak test lasts.")
    group.addoption("--soak-output", help="File for the figures of the soak test.")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not run and how to run it."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    terminalreporter.section("what this run left out")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} skipped: {reason}")
    terminalreporter.line("fuzzers, chaos and soak ran small: make fuzz, make chaos, make soak")
