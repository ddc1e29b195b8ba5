"""Addresses of schedulers: `host:port` or `unix:PATH`, and what a DNS name stands for."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """Where schedulers are: a host name with a port, or, without a host, one gRPC target."""

    text: str
    host: str = ""
    port: int = 0


Resolve = Callable[[Address], Awaitable[list[str]]]


def parse_addresses(text: str) -> list[Address]:
    """The addresses in a comma-separated list; ValueError names the one at fault."""
    addresses = [_parse(part.strip()) for part in text.split(",") if part.strip()]
    if not addresses:
        raise ValueError("schedulers is empty; give at least one host:port or unix:PATH")
    return addresses


async def resolve(address: Address) -> list[str]:
    """Every gRPC target that an address stands for now; OSError if its name has none."""
    if not address.host:
        return [address.text]
    found = await asyncio.get_running_loop().getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    )
    return sorted({_target(family, host[0], address.port) for family, _, _, _, host in found})


def _parse(text: str) -> Address:
    if text.startswith("unix:"):
        return Address(text)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"scheduler address {text!r} is neither host:port nor unix:PATH")
    return Address(text, host, int(port))


def _target(family: int, host: str | int, port: int) -> str:
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
