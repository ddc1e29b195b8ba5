"""Addresses as users write them, and the gRPC targets that they stand for."""

import pytest

from pagewire.addresses import parse_addresses, resolve


async def test_addresses() -> None:
    parsed = parse_addresses("a:1, [::1]:2 ,unix:/tmp/s,127.0.0.1:3")
    assert [(a.host, a.port) for a in parsed] == [("a", 1), ("::1", 2), ("", 0), ("127.0.0.1", 3)]
    assert [await resolve(a) for a in parsed[1:]] == [["[::1]:2"], ["unix:/tmp/s"], ["127.0.0.1:3"]]
    for bad in ("", ",", "host", "host:", ":5", "host:x", "host:70000", "host:0"):
        with pytest.raises(ValueError, match="scheduler"):
            parse_addresses(bad)


async def test_a_host_name_with_an_empty_label_does_not_resolve() -> None:
    (address,) = parse_addresses("a..b:1")
    with pytest.raises(OSError, match=r"'a\.\.b' is no valid host name"):
        await resolve(address)
