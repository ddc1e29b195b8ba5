"""Addresses of services: `host:port` or `unix:PATH`, and the targets of a DNS name or a file."""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Address:
    """An address as it was given.

    With a host and port it is resolved, and may stand for several gRPC targets. With a file it
    stands for the targets in the file. Otherwise `text` itself is the only target.
    """

    text: str
    host: str = ""
    port: int = 0
    file: str = ""


Resolve = Callable[[Address], Awaitable[list[str]]]

_FILE = "file:"


def parse_addresses(text: str) -> list[Address]:
    """Schedulers in a comma-separated list. A host name stands for all its addresses, and
    `file:PATH` for all addresses in a file.

    ValueError names the address at fault.
    """
    addresses = [_parse(part, "scheduler") for part in _split(text)]
    if not addresses:
        raise ValueError("schedulers is empty; give at least one host:port or unix:PATH")
    return addresses


def parse_worker_addresses(text: str) -> list[Address]:
    """Workers in a comma-separated list. An address stands for one worker, unless it begins with
    `dns:` or `dns:///`: then it stands for every address of its name. `file:PATH` stands for every
    address in a file.

    ValueError names the address at fault.
    """
    addresses = []
    for part in _split(text):
        address = _parse(part.removeprefix("dns:").removeprefix("///"), "worker")
        listed = part.startswith(("dns:", _FILE))
        addresses.append(address if listed else Address(part))
    if not addresses:
        raise ValueError(
            "workers is empty; give at least one host:port, unix:PATH, dns:NAME:PORT or file:PATH"
        )
    return addresses


async def resolve(address: Address) -> list[str]:
    """The present gRPC targets of an address.

    OSError if its name does not resolve, or if its file cannot be read or has an invalid line.
    """
    if address.file:
        return _targets_in(address.file)
    if not address.host:
        return [address.text]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )
    except UnicodeError as error:  # such as an empty label, `a..b`
        raise OSError(f"{address.host!r} is not a valid host name: {error}") from error
    return sorted({with_port(str(host[0]), address.port) for _, _, _, _, host in found})


def _targets_in(path: str) -> list[str]:
    """The targets in a file, one a line; lines that begin with # are comments.

    Write a new list to another file and rename that file: a half-written list would be read.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except UnicodeDecodeError as error:
        raise OSError(f"{path} is not text: {error}") from error
    targets = sorted({line for line in lines if line and not line.startswith("#")})
    for target in targets:
        if not is_listen_address(target) or target.endswith(":0"):
            raise OSError(
                f"{path} has the line {target!r}, which is neither host:port nor unix:PATH"
            )
    return targets


def with_port(host: str, port: int) -> str:
    """`host:port` for gRPC and URLs: an IPv6 address is in brackets."""
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
    if text.startswith(_FILE):
        if text == _FILE:
            raise ValueError(f"{service} address {text!r} names no file")
        return Address(text, file=text.removeprefix(_FILE))
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not _is_port(port) or int(port) == 0:
        raise ValueError(f"{service} address {text!r} is not host:port, unix:PATH or file:PATH")
    return Address(text, host, int(port))


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 65536


def is_fault_of_port(error: OSError) -> bool:
    """Whether a server could not listen because of its port, not because of its host."""
    return error.errno in (errno.EADDRINUSE, errno.EACCES)
