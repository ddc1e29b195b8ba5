"""The services of Pagewire on one machine: workers, a scheduler and a gateway."""

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagewire.auth.keys import KEYS_VARIABLE
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.gpus import visible_gpus
from pagewire.cli.launch.ports import claim_port, reachable_host
from pagewire.cli.launch.supervisor import Service
from pagewire.cli.settings.settings import Setting, arguments, build, settings_of, union_of
from pagewire.config import GatewayConfig, ProcessConfig, SchedulerConfig, WorkerConfig, setting
from pagewire.rpc.credentials import SCHEDULER_TOKEN, Credentials

# Seconds for a drained service to close its sockets and free its device.
_GRACE_AFTER_DRAIN = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """Settings that only a stack has."""

    workers: int = setting(1, "Worker processes; with GPUs, each gets one of them.")
    playground: bool = setting(
        False,
        "Let the page kill workers, to see that streams go on. Everybody who may use the page, or "
        "with API keys every operator's key, may do so.",
    )


@dataclass(frozen=True, slots=True)
class Stack:
    """Services in tiers, each of which depends on those before it, and their addresses."""

    tiers: Sequence[Sequence[Service]]
    grpc_address: str
    url: str | None  # of the gateway; None without one
    playground: Path | None = None  # the socket at which the gateway asks to end workers


def stack_settings() -> dict[str, Setting]:
    """The settings of a full stack, without the addresses that it chooses itself."""
    playground = settings_of(StackConfig)["playground"]
    return {**_settings(WorkerConfig, SchedulerConfig, GatewayConfig), "playground": playground}


def control_settings() -> dict[str, Setting]:
    """The settings of workers and a scheduler, without the addresses that the stack chooses."""
    return _settings(WorkerConfig, SchedulerConfig)


def _settings(*configs: type) -> dict[str, Setting]:
    union = union_of(
        configs, without=("worker_address", "workers", "schedulers", "playground_socket")
    )
    # PAGEWIRE_WORKERS is the scheduler's list of worker addresses.
    workers = settings_of(StackConfig)["workers"]
    return {"workers": replace(workers, env="PAGEWIRE_NUM_WORKERS", minimum=1), **union}


def temporary_stack(**given: Any) -> dict[str, Any]:
    """The settings of a stack for one command: free ports, and only warnings are logged."""
    defaults = {name: setting.default for name, setting in stack_settings().items()}
    return {**defaults, "port": 0, "grpc_port": 0, "log_level": "warning", **given}


def control_stack(
    values: Mapping[str, Any], folder: Path, environment: Mapping[str, str] | None = None
) -> Stack:
    """Workers and a scheduler, without a gateway. The workers' sockets are made in `folder`.

    `environment` is added to the scheduler's.
    """
    worker = build(WorkerConfig, _worker_values(values))
    addresses = [f"unix:{folder / f'worker-{index}.sock'}" for index in range(values["workers"])]
    workers = [
        _worker_service(replace(worker, worker_address=address), index, len(addresses))
        for index, address in enumerate(addresses)
    ]
    scheduler = build(SchedulerConfig, values, workers=",".join(addresses))
    address = scheduler.grpc_host
    if not address.startswith("unix:"):
        port = claim_port(scheduler.grpc_host, scheduler.grpc_port, "--grpc-port")
        scheduler = replace(scheduler, grpc_port=port)
        address = f"{reachable_host(scheduler.grpc_host)}:{port}"
    services = [_service("scheduler", scheduler, address, environment)]
    return Stack((workers, services), address, None)


def full_stack(values: Mapping[str, Any], folder: Path) -> Stack:
    """Workers, a scheduler and a gateway. The workers' sockets are made in `folder`."""
    environment = _generated_token(values)
    control = control_stack(values, folder, environment)
    playground = folder / "playground.sock" if values["playground"] else None
    gateway = build(
        GatewayConfig,
        values,
        schedulers=control.grpc_address,
        playground_socket=None if playground is None else str(playground),
    )
    gateway = replace(gateway, port=claim_port(gateway.host, gateway.port, "--port"))
    scheme = "https" if gateway.https_cert else "http"
    url = f"{scheme}://{reachable_host(gateway.host)}:{gateway.port}"
    services = [_service("gateway", gateway, f"{url}/readyz", environment)]
    return Stack((*control.tiers, services), control.grpc_address, url, playground)


def _generated_token(values: Mapping[str, Any]) -> dict[str, str]:
    """A random scheduler token, if there are API keys and no token. Without it, the scheduler could
    not tell its gateway from a client without a key."""
    keys = values["api_keys_file"] or os.environ.get(KEYS_VARIABLE, "").strip()
    given = values["scheduler_token_file"] or os.environ.get(SCHEDULER_TOKEN, "").strip()
    return {SCHEDULER_TOKEN: secrets.token_hex(32)} if keys and not given else {}


def _worker_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of each worker. By default the workers share the CPU's cores, less one for the
    scheduler and the gateway: torch's threads spin while they wait, so a core with other work
    would delay every step."""
    threads = values["torch_threads"]
    if threads is None:
        threads = max(1, ((os.cpu_count() or 1) - 1) // values["workers"])
    return {**values, "torch_threads": threads}


def _worker_service(config: WorkerConfig, index: int, count: int) -> Service:
    """Worker `index` of `count`, with a metrics port and, if there are GPUs, a GPU of its own."""
    if config.worker_metrics_port:  # 0 stays: each worker takes a free port
        config = replace(config, worker_metrics_port=config.worker_metrics_port + index)
    gpus = visible_gpus() if count > 1 and config.device in ("auto", "cuda") else []
    environment = {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}
    return _service(f"worker-{index}", config, config.worker_address, environment)


def _service(
    name: str,
    config: GatewayConfig | SchedulerConfig | WorkerConfig,
    health: str,
    environment: Mapping[str, str] | None = None,
) -> Service:
    command = name.split("-")[0]
    return Service(
        name=name,
        command=(sys.executable, "-m", "pagewire.cli.main", command, *arguments(config)),
        health=health,
        credentials=_credentials(config),
        grace=config.drain_timeout + _GRACE_AFTER_DRAIN,
        environment=environment or {},
    )


def _credentials(config: ProcessConfig) -> Credentials:
    try:
        return Credentials.of(config)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
