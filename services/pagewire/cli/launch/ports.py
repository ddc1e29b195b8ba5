"""Free TCP ports on this machine."""

import errno
import random
import socket
from pathlib import Path

from pagewire.addresses import is_fault_of_port
from pagewire.cli.errors import CommandError

_MIN_PORT = 10_000
# The file with Linux's port range for outgoing connections, and the usual start of the range.
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_OUTGOING = 32768

# Ports that `free_port` returned in this process. They may not be bound yet.
_offered: set[int] = set()


def claim_port(host: str, port: int, flag: str) -> int:
    """The port to listen on: `port`, or a free one if it is 0.

    The port is free when this returns, but not reserved. CommandError names `flag` if the port
    cannot be used, and the flag of the host if the host is not an address of this machine.
    """
    try:
        return _bound(host, port) if port else free_port(host)
    except OSError as error:
        remedy = f"give another with {flag}, or 0 for any free one"
        if not is_fault_of_port(error):
            remedy = f"give an address of this machine with {flag.replace('port', 'host')}"
        raise CommandError(
            f"cannot listen on {host} port {port}: {error.strerror}; {remedy}"
        ) from error


def free_port(host: str = "127.0.0.1") -> int:
    """A free port, another one at each call.

    It lies outside the range of outgoing connections. Such a connection could use the port before
    the server binds it, or while the server restarts. OSError if the host is not an address of this
    machine.
    """
    candidates = [port for port in range(_MIN_PORT, _first_outgoing()) if port not in _offered]
    random.shuffle(candidates)
    for port in candidates:
        try:
            _bound(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            _offered.add(port)
            return port
    return _bound(host, 0)


def reachable_host(host: str) -> str:
    """The host in URLs by which this machine reaches a server that listens on `host`."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{local}]" if ":" in local else local


def _first_outgoing() -> int:
    try:
        return int(_OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _DEFAULT_OUTGOING


def _bound(host: str, port: int) -> int:
    """Binds a socket to `port` and closes it; returns its port. OSError if that fails."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # Servers set this too, so that lingering connections of an earlier server do not matter.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return int(listener.getsockname()[1])
