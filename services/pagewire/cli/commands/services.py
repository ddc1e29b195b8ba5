"""The commands that run one service each, and ask one for its health."""

import asyncio
import gc
import os
from typing import Annotated, Any

import typer

from pagewire.cli.errors import CommandError
from pagewire.cli.launch.health import problem_of
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

# The services are imported when they run: no image holds what all of them need, and
# `pagewire --help` need not wait for torch.

# gRPC's event engine passes what it reads through a pool of threads, each of which must be woken;
# without it the thread that wakes the event loop reads by itself: an eighth less CPU for a step of
# a scheduler at an H200's pace. gRPC looks for this when it is imported, and a release that does
# not know the names any more says so and goes on.
_NO_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"

_PROCESS = settings_of(ProcessConfig)


def _tls(name: str) -> Any:
    setting = _PROCESS[name]
    return typer.Option(setting.flag, envvar=setting.env, help=setting.help)


@configured(settings_of(GatewayConfig))
def gateway(values: dict[str, Any]) -> None:
    """Run a gateway: the OpenAI-style HTTP API in front of schedulers."""
    from pagewire.gateway.server import run_gateway

    run_gateway(build(GatewayConfig, values))


@configured(settings_of(SchedulerConfig))
def scheduler(values: dict[str, Any]) -> None:
    """Run a scheduler: the control plane in front of workers."""
    os.environ.setdefault("GRPC_EXPERIMENTS", _NO_EVENT_ENGINE)
    from pagewire.scheduler.server import run_scheduler

    run_scheduler(build(SchedulerConfig, values))


@configured(settings_of(WorkerConfig))
def worker(values: dict[str, Any]) -> None:
    """Run a worker: a model on one device."""
    from pagewire.worker.startup.compile_pool import start_compile_pool
    from pagewire.worker.startup.cuda_context import open_cuda_context

    config = build(WorkerConfig, values)
    # Both are at work beside the next line, which imports torch.
    pool = start_compile_pool(config)
    open_cuda_context(config)
    # What is imported stays, and there is much of it: nobody looks for garbage in it, now or later.
    gc.disable()
    from pagewire.worker.server import run_worker

    gc.freeze()
    gc.enable()
    run_worker(config, pool)


@configured(settings_of(SimulatedWorkerConfig))
def simulated_worker(values: dict[str, Any]) -> None:
    """Run workers that only take the time: no GPU, no torch, deterministic tokens."""
    from pagewire.simulator.worker import run_simulated_worker

    run_simulated_worker(build(SimulatedWorkerConfig, values))


def health(
    address: Annotated[
        str,
        typer.Argument(help="host:port or unix:PATH of a gRPC service, or an http:// URL."),
    ],
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 2.0,
    tls_ca: Annotated[str | None, _tls("tls_ca")] = None,
    tls_cert: Annotated[str | None, _tls("tls_cert")] = None,
    tls_key: Annotated[str | None, _tls("tls_key")] = None,
    tls_server_name: Annotated[str | None, _tls("tls_server_name")] = None,
) -> None:
    """Ask a service whether it is healthy; the exit status is 0 if it is."""
    try:
        credentials = Credentials.of(
            ProcessConfig(
                tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
            )
        )
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    problem = asyncio.run(problem_of(address, timeout, credentials))
    if problem is not None:
        raise CommandError(f"{address} is not healthy: {problem}")
    print(f"{address} is healthy")
