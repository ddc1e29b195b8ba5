"""TCP ports on this machine."""

import socket

from pagewire.cli.errors import CommandError


def claim_port(host: str, port: int, flag: str) -> int:
    """The port to listen on: `port` if it is free, a free one if it is 0.

    It is free when this returns, but not reserved. CommandError names the flag when it is not.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # As servers do, so that connections of an earlier one that linger do not count.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            return int(listener.getsockname()[1])
    except OSError as error:
        raise CommandError(
            f"cannot listen on {host} port {port}: {error.strerror}; "
            f"give another with {flag}, or 0 for any free one"
        ) from error


def reachable_host(host: str) -> str:
    """The host at which this machine reaches a server that listens on `host`, fit for a URL."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{local}]" if ":" in local else local
