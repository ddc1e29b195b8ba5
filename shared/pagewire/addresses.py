"""Addresses of services: `host:port` or `unix:PATH`, and what a DNS name stands for."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """A host name with a port, which stands for many, or, without a host, one gRPC target."""

    text: str
    host: str = ""
    port: int = 0


Resolve = Callable[[Address], Awaitable[list[str]]]


def parse_addresses(text: str) -> list[Address]:
    """Schedulers in a comma-separated list, each name standing for all that it resolves to.

    ValueError names the one at fault.
    """
    addresses = [_parse(part, "scheduler") for part in _split(text)]
    if not addresses:
        raise ValueError("schedulers is empty; give at least one host:port or unix:PATH")
    return addresses


def parse_worker_addresses(text: str) -> list[Address]:
    """Workers in a comma-separated list: one each, but for names after `dns:` or `dns:///`.

    ValueError names the one at fault.
    """
    addresses = []
    for part in _split(text):
        address = _parse(part.removeprefix("dns:").removeprefix("///"), "worker")
        addresses.append(address if part.startswith("dns:") else Address(part))
    if not addresses:
        raise ValueError(
            "workers is empty; give at least one host:port, unix:PATH or dns:NAME:PORT"
        )
    return addresses


async def resolve(address: Address) -> list[str]:
    """Every gRPC target that an address stands for now; OSError if its name has none."""
    if not address.host:
        return [address.text]
    found = await asyncio.get_running_loop().getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    )
    return sorted({_target(family, host[0], address.port) for family, _, _, _, host in found})


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse(text: str, service: str) -> Address:
    if text.startswith("unix:"):
        return Address(text)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{service} address {text!r} is neither host:port nor unix:PATH")
    return Address(text, host, int(port))


def _target(family: int, host: str | int, port: int) -> str:
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
