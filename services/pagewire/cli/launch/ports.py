"""TCP ports on this machine."""

import errno
import random
import socket
from pathlib import Path

from pagewire.cli.errors import CommandError

_LOWEST = 10_000
# Linux says here which ports it gives outgoing connections; what it does not say starts higher.
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_OUTGOING = 32768

# By `free_port`, in this process: what it gave is not bound yet, and must not be given again.
_offered: set[int] = set()


def claim_port(host: str, port: int, flag: str) -> int:
    """The port to listen on: `port` if it is free, a free one if it is 0.

    It is free when this returns, but not reserved. CommandError names the flag when it is not.
    """
    try:
        return _bound(host, port) if port else free_port(host)
    except OSError as error:
        raise CommandError(
            f"cannot listen on {host} port {port}: {error.strerror}; "
            f"give another with {flag}, or 0 for any free one"
        ) from error


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on, each time another.

    It is none of those that outgoing connections are given, any of which could have it before the
    server does for which it is meant, or the one that is started in that server's place. OSError if
    the host is no address of this machine.
    """
    candidates = [port for port in range(_LOWEST, _first_outgoing()) if port not in _offered]
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
    """The host at which this machine reaches a server that listens on `host`, fit for a URL."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{local}]" if ":" in local else local


def _first_outgoing() -> int:
    try:
        return int(_OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_OUTGOING


def _bound(host: str, port: int) -> int:
    """The port that a listener is given that asks for `port`; OSError if it is given none."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # As servers do, so that connections of an earlier one that linger do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return int(listener.getsockname()[1])
