"""Addresses: their form, and which of them are local to this machine."""

import logging
import re
import socket
from pathlib import Path

import pytest

from pagewire.addresses import (
    is_fault_of_port,
    is_listen_address,
    is_local,
    is_loopback,
    parse_addresses,
    parse_worker_addresses,
    resolve,
    with_port,
)
from pagewire.rpc.targets import Targets


@pytest.mark.parametrize(
    ("host", "address"),
    [("a.b", "a.b:1"), ("127.0.0.1", "127.0.0.1:1"), ("::1", "[::1]:1"), ("[::1]", "[::1]:1")],
)
def test_hosts_of_every_kind_are_written_with_a_port(host: str, address: str) -> None:
    assert with_port(host, 1) == address


@pytest.mark.parametrize(
    ("address", "valid"),
    [
        ("unix:/run/a.sock", True),
        ("127.0.0.1:0", True),
        ("[::1]:65535", True),
        ("127.0.0.1:65536", False),
        ("127.0.0.1:" + "9" * 5000, False),
        ("127.0.0.1:-1", False),
        ("127.0.0.1", False),
        (":50061", False),
    ],
)
def test_a_server_can_listen_on_a_host_with_a_port_or_a_socket(address: str, valid: bool) -> None:
    assert is_listen_address(address) is valid


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/run/a.sock", True),
        ("localhost:1", True),
        ("127.0.0.2:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("192.0.2.1:1", False),
        ("example.org:1", False),
    ],
)
def test_local_addresses_are_those_that_only_this_machine_reaches(
    address: str, local: bool
) -> None:
    assert is_local(address) is local
    if not address.startswith("unix:"):
        assert is_loopback(address.rpartition(":")[0].strip("[]")) is local


async def test_addresses() -> None:
    parsed = parse_addresses("a:1, [::1]:2 ,unix:/tmp/s,127.0.0.1:3")
    assert [(a.host, a.port) for a in parsed] == [("a", 1), ("::1", 2), ("", 0), ("127.0.0.1", 3)]
    assert [await resolve(a) for a in parsed[1:]] == [["[::1]:2"], ["unix:/tmp/s"], ["127.0.0.1:3"]]
    for bad in ("", ",", "host", "host:", ":5", "host:x", "host:70000", "host:0"):
        with pytest.raises(ValueError, match="scheduler"):
            parse_addresses(bad)


async def test_a_host_name_with_an_empty_label_does_not_resolve() -> None:
    (address,) = parse_addresses("a..b:1")
    with pytest.raises(OSError, match=r"'a\.\.b' is not a valid host name"):
        await resolve(address)


async def test_a_file_stands_for_the_addresses_in_it_now(tmp_path: Path) -> None:
    listed = tmp_path / "workers"
    [address] = parse_worker_addresses(f"file:{listed}")
    with pytest.raises(OSError, match="workers"):
        await resolve(address)
    listed.write_text("# two workers\n10.0.0.2:50061\n\n unix:/run/a.sock\n10.0.0.2:50061\n")
    assert await resolve(address) == ["10.0.0.2:50061", "unix:/run/a.sock"]
    listed.write_text("")
    assert await resolve(address) == []
    assert parse_addresses(f"file:{listed}") == [address]


@pytest.mark.parametrize("line", ["worker", "worker:", "worker:0", "worker:50061:x"])
async def test_a_file_with_another_kind_of_line_is_refused_as_a_whole(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "workers").write_text(f"10.0.0.2:50061\n{line}\n")
    [address] = parse_worker_addresses(f"file:{tmp_path}/workers")
    with pytest.raises(OSError, match=re.escape(repr(line))):
        await resolve(address)


def test_an_address_of_a_file_names_one() -> None:
    with pytest.raises(ValueError, match="names no file"):
        parse_worker_addresses("file:")


def test_a_port_that_is_taken_and_a_host_of_another_machine_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, fault in (("127.0.0.1", True), ("192.0.2.1", False), ("no.such.invalid", False)):
            with pytest.raises(OSError) as refused:
                socket.create_server((host, taken.getsockname()[1]))
            assert is_fault_of_port(refused.value) is fault


async def test_a_fault_of_an_address_is_logged_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "list"
    [address] = parse_addresses(f"file:{file}")
    targets = Targets([address], resolve, logging.getLogger("test"))

    async def warnings() -> int:
        caplog.clear()
        await targets.refresh()
        return sum(record.levelno == logging.WARNING for record in caplog.records)

    assert [await warnings() for _ in range(3)] == [1, 0, 0]
    file.write_text("no address")
    assert [await warnings() for _ in range(2)] == [1, 0]
    file.write_text("a:1")
    assert [await warnings() for _ in range(2)] == [0, 0]
    file.unlink()
    assert [await warnings() for _ in range(2)] == [1, 0]
    assert await targets.refresh() == {"a:1"}
