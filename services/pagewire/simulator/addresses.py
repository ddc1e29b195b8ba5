"""The addresses of several simulated workers of one process."""


def addresses_of(first: str, count: int) -> list[str]:
    """`first` for one worker; else that port and the next ones, or unix:PATH.0, unix:PATH.1, ...

    Port 0 stays 0: each worker uses a free port. Raises ValueError if there are too few ports.
    """
    if count == 1:
        return [first]
    if first.startswith("unix:"):
        return [f"{first}.{index}" for index in range(count)]
    host, _, port = first.rpartition(":")
    if not port.isdecimal():
        raise ValueError(f"address {first!r} has no port; give host:port or unix:PATH")
    if int(port) == 0:
        return [first] * count
    if int(port) + count - 1 > 65535:
        raise ValueError(
            f"{count} workers from port {port} on need ports above 65535; give a lower port"
        )
    return [f"{host}:{int(port) + index}" for index in range(count)]
