"""What an address to listen on says about who can reach it."""

import ipaddress


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
