"""Addresses of services: `host:port` or `unix:PATH`, and the targets that a DNS name stands for."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """An address as it was given.

    With a host and port it is resolved, and may stand for several gRPC targets. Without a host,
    `text` itself is the one target.
    """

    text: str
    host: str = ""
    port: int = 0


Resolve = Callable[[Address], Awaitable[list[str]]]


def parse_addresses(text: str) -> list[Address]:
    """Schedulers in a comma-separated list; each host name stands for every address of it.

    ValueError names the address at fault.
    """
    addresses = [_parse(part, "scheduler") for part in _split(text)]
    if not addresses:
        raise ValueError("schedulers is empty; give at least one host:port or unix:PATH")
    return addresses


def parse_worker_addresses(text: str) -> list[Address]:
    """Workers in a comma-separated list. An address stands for one worker, unless it begins with
    `dns:` or `dns:///`: then it stands for every address of its name.

    ValueError names the address at fault.
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
    """The gRPC targets that an address stands for now; OSError if its name does not resolve."""
    if not address.host:
        return [address.text]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )
    except UnicodeError as error:  # such as an empty label, `a..b`
        raise OSError(f"{address.host!r} is no valid host name: {error}") from error
    return sorted({with_port(str(host[0]), address.port) for _, _, _, _, host in found})


def with_port(host: str, port: int) -> str:
    """`host:port`, as gRPC and URLs take it: an IPv6 address in brackets."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def listen_address(host: str, port: int) -> str:
    """The address of a gRPC server: `host` itself if it is `unix:PATH`, else `host:port`."""
    return host if host.startswith("unix:") else with_port(host, port)


def is_listen_address(address: str) -> bool:
    """Whether a gRPC server can listen on an address: `unix:PATH`, or `host:port` with port 0 for
    any free one."""
    host, _, port = address.rpartition(":")
    return address.startswith("unix:") or (bool(host) and _is_port(port))


def is_local(address: str) -> bool:
    """Whether `host:port` or `unix:PATH` can be reached from this machine only."""
    if address.startswith("unix:"):
        return True
    return is_loopback(address.rpartition(":")[0].strip("[]"))


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse(text: str, service: str) -> Address:
    if text.startswith("unix:"):
        return Address(text)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not _is_port(port) or int(port) == 0:
        raise ValueError(f"{service} address {text!r} is neither host:port nor unix:PATH")
    return Address(text, host, int(port))


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 65536
