"""The commands that run a service, and the health check of a service."""

import asyncio
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from pagewire.cli.errors import CommandError
from pagewire.cli.launch.health import health_problem
from pagewire.cli.launch.model_files import with_model_files
from pagewire.cli.settings.options import configured
from pagewire.cli.settings.settings import build, settings_of
from pagewire.config import (
    GatewayConfig,
    ProcessConfig,
    SchedulerConfig,
    SimulatedWorkerConfig,
    WorkerConfig,
)
from pagewire.rpc.credentials import Credentials

# Only its command imports a service: no image has the dependencies of all services, and
# `pagewire --help` does not wait for torch.

# gRPC's event engine reads on a pool of threads that must be woken. Without it, the thread that
# wakes the event loop reads. Then a scheduler's step at an H200's pace needs an eighth less CPU,
# and a gateway needs a tenth less for answers without streams. gRPC reads this variable when it is
# imported. So the modules that all commands import must not import gRPC. A release without these
# names logs this and continues.
_NO_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"

_PROCESS = settings_of(ProcessConfig)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disables garbage collection during imports, and excludes the imported objects from later
    collections: they are many and never freed."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def _tls(name: str) -> Any:
    setting = _PROCESS[name]
    return typer.Option(setting.flag, envvar=setting.env, help=setting.help)


@configured(settings_of(GatewayConfig))
def gateway(values: dict[str, Any]) -> None:
    """Run a gateway: the OpenAI-style HTTP API in front of schedulers."""
    os.environ.setdefault("GRPC_EXPERIMENTS", _NO_EVENT_ENGINE)
    with _no_collections():
        from pagewire.gateway.server import run_gateway

    run_gateway(build(GatewayConfig, values))


@configured(settings_of(SchedulerConfig))
def scheduler(values: dict[str, Any]) -> None:
    """Run a scheduler: the control plane in front of workers."""
    os.environ.setdefault("GRPC_EXPERIMENTS", _NO_EVENT_ENGINE)
    with _no_collections():
        from pagewire.scheduler.server import run_scheduler

    run_scheduler(build(SchedulerConfig, with_model_files(values, weights=False)))


@configured(settings_of(WorkerConfig))
def worker(values: dict[str, Any]) -> None:
    """Run a worker: a model on one device, or an external program."""
    if values["backend"] == "command":
        from pagewire.worker.server import run_worker

        run_worker(build(WorkerConfig, with_model_files(values, weights=False)))
        return
    from pagewire.worker.startup.compile_pool import start_compile_pool
    from pagewire.worker.startup.cuda_context import open_cuda_context

    config = build(WorkerConfig, with_model_files(values, tokenizer=False))
    # Both run in the background while torch is imported below.
    pool = start_compile_pool(config)
    open_cuda_context(config)
    with _no_collections():
        import pagewire.worker.startup.loading  # noqa: F401 - torch, which takes seconds
        from pagewire.worker.server import run_worker

    run_worker(config, pool)


@configured(settings_of(SimulatedWorkerConfig))
def simulated_worker(values: dict[str, Any]) -> None:
    """Run simulated workers: deterministic tokens at a device's pace, without GPU or torch."""
    with _no_collections():
        from pagewire.simulator.worker import run_simulated_worker

    values = with_model_files(values, tokenizer=False, weights=False)
    run_simulated_worker(build(SimulatedWorkerConfig, values))


def health(
    address: Annotated[
        str,
        typer.Argument(help="host:port or unix:PATH of a gRPC service, or an HTTP URL."),
    ],
    timeout: Annotated[
        float, typer.Option(min=0.001, max=86_400, help="Seconds to wait for the answer.")
    ] = 2.0,
    tls_ca: Annotated[str | None, _tls("tls_ca")] = None,
    tls_cert: Annotated[str | None, _tls("tls_cert")] = None,
    tls_key: Annotated[str | None, _tls("tls_key")] = None,
    tls_server_name: Annotated[str | None, _tls("tls_server_name")] = None,
) -> None:
    """Check the health of a service. The exit status is 0 if it is healthy."""
    try:
        credentials = Credentials.of(
            ProcessConfig(
                tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
            )
        )
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    problem = asyncio.run(health_problem(address, timeout, credentials))
    if problem is not None:
        raise CommandError(f"{address} is not healthy: {problem}")
    print(f"{address} is healthy")
