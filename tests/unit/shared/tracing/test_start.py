"""Tracing is off by default, and then OpenTelemetry is not imported."""

import subprocess
import sys

import pytest

from pagewire.config import GatewayConfig
from pagewire.tracing.start import start_tracing

# FastAPI imports OpenTelemetry's API where it is installed, but neither its SDK nor an exporter.
_SERVERS = {
    "gateway.server": ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto"),
    "scheduler.server": ("opentelemetry",),
    "worker.server": ("opentelemetry",),
    "simulator.worker": ("opentelemetry",),
    "cli.main": ("opentelemetry",),
}

_PROGRAM = """
import importlib, sys
from pagewire.config import ProcessConfig
from pagewire.tracing.start import start_tracing
importlib.import_module("pagewire." + sys.argv[1])
assert start_tracing(ProcessConfig(), "x") is None
print([name for name in sys.modules if name.startswith(tuple(sys.argv[2:]))])
"""


@pytest.mark.parametrize("module", _SERVERS)
def test_nothing_of_opentelemetry_is_imported_without_an_endpoint(module: str) -> None:
    unwanted = ("pagewire.tracing.otel", *_SERVERS[module])
    command = [sys.executable, "-c", _PROGRAM, module, *unwanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_packages_that_an_endpoint_needs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pagewire.tracing.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = GatewayConfig(otlp_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ValueError, match=r"otlp_endpoint is 'http.*install -e '\.\[otel\]'"):
        start_tracing(config, "gateway")
