"""Addresses to listen on: how they are written, and what they say about who can reach them."""

import ipaddress


def with_port(host: str, port: int) -> str:
    """`host:port`, as gRPC and URLs take it: an IPv6 address in brackets."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def is_local(address: str) -> bool:
    """Whether only this machine reaches `host`, `host:port` or `unix:PATH`."""
    if address.startswith("unix:"):
        return True
    return is_loopback(address.rpartition(":")[0].strip("[]"))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host by its name or number."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
