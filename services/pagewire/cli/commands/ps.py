"""`pagewire ps`: the services that run on this machine, and their load."""

import asyncio
from typing import Any

from pagewire.cli.client import authorization, model_cards
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.health import health_problem
from pagewire.cli.launch.ports import reachable_host
from pagewire.cli.launch.running import RunningService, running_services
from pagewire.cli.table import table
from pagewire.models import served_name
from pagewire.rpc.credentials import SCHEDULER_TOKEN, WORKER_TOKEN, Credentials, read_token

_TIMEOUT = 2.0


def ps() -> None:
    """Show the services that run on this machine: where they listen, and their load.

    Secrets are not read from other processes: a server with API keys answers if PAGEWIRE_API_KEY
    is set, a scheduler with a token if PAGEWIRE_SCHEDULER_TOKEN is.
    """
    services = running_services()
    if not services:
        print("No service of Pagewire runs on this machine; start one with `pagewire run`.")
        return
    print(
        table(
            ("SERVICE", "PID", "MODEL", "UP", "MEMORY", "ADDRESS", "LOAD"),
            asyncio.run(_rows(services)),
        )
    )


async def _rows(services: list[RunningService]) -> list[tuple[str, ...]]:
    loads = await asyncio.gather(*map(_load, services))
    return [
        (
            service.kind,
            str(service.pid),
            _model(service),
            _duration(service.seconds),
            f"{service.resident_bytes >> 20} MiB",
            _address(service) or "-",
            load,
        )
        for service, load in zip(services, loads, strict=True)
    ]


def _model(service: RunningService) -> str:
    """The model of a scheduler or worker, by its name in requests."""
    values = service.values
    return served_name(values["model"], values["served_model_name"]) if "model" in values else "-"


def _address(service: RunningService) -> str:
    values = service.values
    if service.kind == "gateway":
        scheme = "https" if values["https_cert"] else "http"
        return f"{scheme}://{reachable_host(values['host'])}:{values['port']}"
    if service.kind == "scheduler":
        host = values["grpc_host"]
        unix = host.startswith("unix:")
        return str(host) if unix else f"{reachable_host(host)}:{values['grpc_port']}"
    return str(values.get("worker_address", ""))


async def _load(service: RunningService) -> str:
    """The load of a service, or the reason why it is not known."""
    address = _address(service)
    if not address:
        return "supervises the services below"
    try:
        if service.kind == "gateway":
            return await _gateway_load(address)
        if service.kind == "scheduler":
            return await _scheduler_load(address, service.values)
        credentials = _credentials(service.values, "worker_token_file", WORKER_TOKEN)
        problem = await health_problem(address, _TIMEOUT, credentials)
    except (CommandError, OSError, ValueError) as error:
        return str(error)
    # gRPC's details after the code are long, and repeat the address.
    return "serving" if problem is None else ": ".join(problem.split(": ")[:2])


async def _gateway_load(url: str) -> str:
    import httpx

    cards = await model_cards(url)
    if cards is None:
        return "does not answer"
    try:
        async with httpx.AsyncClient(
            timeout=_TIMEOUT, trust_env=False, headers=authorization()
        ) as client:
            answer = await client.get(f"{url}/load")
    except httpx.TransportError:  # the service has ended since, or is busy
        return "does not answer"
    served = ", ".join(str(card["id"]) for card in cards) or "no model yet"
    return f"{served}; {_count(answer.json()['server_load'], 'request')} open"


async def _scheduler_load(address: str, values: Any) -> str:
    import grpc

    from pagewire.rpc.transport import open_channel
    from pagewire.v1 import inference_pb2 as pb
    from pagewire.v1.inference_pb2_grpc import InferenceStub

    credentials = _credentials(values, "scheduler_token_file", SCHEDULER_TOKEN)
    async with open_channel(address, credentials) as channel:
        try:
            load = await InferenceStub(channel).GetLoad(
                pb.GetLoadRequest(), timeout=_TIMEOUT, metadata=credentials.metadata
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return f"needs its token: set {SCHEDULER_TOKEN}"
            return f"does not answer: {error.code().name}"
    return (
        f"{load.running} running, {load.waiting} waiting; {load.used_blocks} of "
        f"{load.total_blocks} blocks; {_count(load.ready_workers, 'worker')}"
    )


def _credentials(values: Any, file: str, variable: str) -> Credentials:
    from pagewire.config import ProcessConfig

    names = ("tls_cert", "tls_key", "tls_ca", "tls_server_name")
    config = ProcessConfig(**{name: values[name] for name in names})
    return Credentials.of(config).with_token(read_token(values[file], variable))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
