"""The services of Pagewire on one machine: workers, a scheduler for each model, and a gateway."""

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagewire.auth.keys import KEYS_VARIABLE
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.gpus import visible_gpus
from pagewire.cli.launch.ports import claim_port, reachable_host
from pagewire.cli.launch.supervisor import Service
from pagewire.cli.settings.settings import Setting, arguments, build, settings_of, union_of
from pagewire.config import GatewayConfig, ProcessConfig, SchedulerConfig, WorkerConfig, setting
from pagewire.models import served_name
from pagewire.rpc.credentials import SCHEDULER_TOKEN, Credentials

# Seconds for a drained service to close its sockets and free its device.
_GRACE_AFTER_DRAIN = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """Settings that only a stack has."""

    workers: int = setting(1, "Worker processes; with GPUs, each gets one of them.")
    playground: bool = setting(
        False,
        "Allow the page to kill workers, to show that streams continue. Without API keys everyone "
        "who can open the page may do so, with API keys only an operator's key.",
    )


@dataclass(frozen=True, slots=True)
class ModelServices:
    """A model of a stack: its name in requests, its scheduler, and the scheduler's gRPC address.

    `values` are the settings of its services.
    """

    name: str
    scheduler: Service
    grpc_address: str
    values: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Stack:
    """Services in tiers, and their addresses. Each tier depends on the earlier tiers."""

    tiers: Sequence[Sequence[Service]]
    models: Sequence[ModelServices]
    url: str | None  # of the gateway; None without one
    playground: Path | None = None  # the socket for the gateway's requests to end workers

    @property
    def grpc_address(self) -> str:
        """The address of the scheduler; with several models, of the first one."""
        return self.models[0].grpc_address


def stack_settings() -> dict[str, Setting]:
    """The settings of a full stack, without the addresses that it chooses itself."""
    playground = settings_of(StackConfig)["playground"]
    return {**_settings(WorkerConfig, SchedulerConfig, GatewayConfig), "playground": playground}


def control_settings() -> dict[str, Setting]:
    """The settings of workers and a scheduler, without the addresses that the stack chooses."""
    return _settings(WorkerConfig, SchedulerConfig)


def _settings(*configs: type) -> dict[str, Setting]:
    union = union_of(
        configs,
        without=("worker_address", "workers", "schedulers", "expected_models", "playground_socket"),
    )
    # PAGEWIRE_WORKERS is the scheduler's list of worker addresses.
    workers = settings_of(StackConfig)["workers"]
    workers = replace(workers, env="PAGEWIRE_NUM_WORKERS", minimum=1, maximum=1024)
    return {"workers": workers, **union}


def model_settings() -> dict[str, Setting]:
    """The settings that each of several models may set for itself: not those of the gateway or of
    every process."""
    everyone = {"served_model_name", "worker_token_file", *settings_of(GatewayConfig)}
    # The stack counts up from the common ports.
    ports = {"grpc_host", "grpc_port", "worker_metrics_port", "scheduler_metrics_port"}
    own = control_settings()
    return {name: own[name] for name in own if name not in {"model", *everyone, *ports}}


def temporary_stack(**given: Any) -> dict[str, Any]:
    """The settings of a stack for one command: free ports, and a log of warnings only."""
    defaults = {name: setting.default for name, setting in stack_settings().items()}
    return {**defaults, "port": 0, "grpc_port": 0, "log_level": "warning", **given}


def control_stack(
    values: Mapping[str, Any], folder: Path, environment: Mapping[str, str] | None = None
) -> Stack:
    """Workers and a scheduler for each model, without a gateway.

    The workers' sockets are made in `folder`. `environment` is added to the schedulers'.
    """
    models = values_of_models(values)
    num_workers = sum(each["workers"] for each in models)
    workers: list[Service] = []
    served = []
    for index, own in enumerate(models):
        prefix = f"{own['served_model_name']}/" if len(models) > 1 else ""
        sockets = [
            folder / f"worker-{number}.sock"
            for number in range(len(workers), len(workers) + own["workers"])
        ]
        addresses = [f"unix:{socket}" for socket in sockets]
        config = build(WorkerConfig, _worker_values(own, num_workers))
        for number, address in enumerate(addresses):
            worker = replace(config, worker_address=address)
            name = f"{prefix}worker-{number}"
            workers.append(_worker_service(name, worker, len(workers), num_workers))
        served.append(_model_services(f"{prefix}scheduler", own, addresses, index, environment))
    return Stack((workers, [each.scheduler for each in served]), served, None)


def values_of_models(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of each model's services: the common ones, overridden by its own."""
    shared = {name: value for name, value in values.items() if name != "models"}
    return [{**shared, **own} for own in values.get("models", ({},))]


def full_stack(values: Mapping[str, Any], folder: Path) -> Stack:
    """Workers and a scheduler for each model, and a gateway. The workers' sockets are made in
    `folder`."""
    environment = _generated_token(values)
    control = control_stack(values, folder, environment)
    playground = folder / "playground.sock" if values["playground"] else None
    # None for a single model: its name may have a comma, and no other is served before it.
    expected = [model.name for model in control.models] if len(control.models) > 1 else []
    gateway = build(
        GatewayConfig,
        values,
        schedulers=",".join(model.grpc_address for model in control.models),
        expected_models=",".join(expected),
        playground_socket=None if playground is None else str(playground),
    )
    gateway = replace(gateway, port=claim_port(gateway.host, gateway.port, "--port"))
    scheme = "https" if gateway.https_cert else "http"
    url = f"{scheme}://{reachable_host(gateway.host)}:{gateway.port}"
    services = [_service("gateway", gateway, f"{url}/readyz", environment)]
    return Stack((*control.tiers, services), control.models, url, playground)


def _generated_token(values: Mapping[str, Any]) -> dict[str, str]:
    """A random scheduler token, if there are API keys and no token. Without it, the scheduler could
    not distinguish its gateway from a client without a key."""
    keys = values["api_keys_file"] or os.environ.get(KEYS_VARIABLE, "").strip()
    given = values["scheduler_token_file"] or os.environ.get(SCHEDULER_TOKEN, "").strip()
    return {SCHEDULER_TOKEN: secrets.token_hex(32)} if keys and not given else {}


def _worker_values(values: Mapping[str, Any], num_workers: int) -> dict[str, Any]:
    """The settings of a model's workers. By default all workers share the CPU's cores, except one
    core for the schedulers and the gateway: torch's threads spin while they wait, so a core with
    other work would delay every step."""
    threads = values["torch_threads"]
    if threads is None:
        threads = max(1, ((os.cpu_count() or 1) - 1) // num_workers)
    return {**values, "torch_threads": threads}


def _worker_service(name: str, config: WorkerConfig, index: int, count: int) -> Service:
    """Worker `index` of `count`, with a metrics port and, if there are GPUs, a GPU of its own."""
    if config.worker_metrics_port:  # 0 stays: each worker takes a free port
        config = replace(config, worker_metrics_port=config.worker_metrics_port + index)
    gpus = visible_gpus() if count > 1 and config.device in ("auto", "cuda") else []
    environment = {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}
    return _service(name, config, config.worker_address, environment)


def _model_services(
    name: str,
    values: Mapping[str, Any],
    workers: Sequence[str],
    index: int,
    environment: Mapping[str, str] | None,
) -> ModelServices:
    """Model `index` of several, with a scheduler called `name` and with its own ports."""
    config = build(SchedulerConfig, values, workers=",".join(workers))
    if config.scheduler_metrics_port:
        port = config.scheduler_metrics_port + index
        config = replace(config, scheduler_metrics_port=port)
    address = config.grpc_host
    if address.startswith("unix:") and index > 0:
        raise CommandError(
            f"grpc_host {address} has room for the scheduler of one model; give a host, on which "
            "each model takes a port of its own"
        )
    if not address.startswith("unix:"):
        port = config.grpc_port + index if config.grpc_port else 0
        config = replace(config, grpc_port=claim_port(config.grpc_host, port, "--grpc-port"))
        address = f"{reachable_host(config.grpc_host)}:{config.grpc_port}"
    service = _service(name, config, address, environment)
    model = served_name(config.model, config.served_model_name)
    return ModelServices(model, service, address, values)


def _service(
    name: str,
    config: GatewayConfig | SchedulerConfig | WorkerConfig,
    health: str,
    environment: Mapping[str, str] | None = None,
) -> Service:
    command = name.rpartition("/")[2].split("-")[0]
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
