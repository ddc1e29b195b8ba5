"""Free ports for servers of this machine."""

import re
import socket
from pathlib import Path

import pytest

from pagewire.cli.errors import CommandError
from pagewire.cli.launch import ports
from pagewire.cli.launch.ports import claim_port, free_port


@pytest.fixture
def outgoing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the range of outgoing connections' ports."""
    path = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "_OUTGOING", path)
    monkeypatch.setattr(ports, "_offered", set())
    return path


def test_each_port_is_another_one_outside_the_outgoing_range(outgoing: Path) -> None:
    outgoing.write_text("10300\t60999\n")
    given = {free_port() for _ in range(50)}
    assert len(given) == 50
    assert min(given) >= 10_000
    assert max(given) < 10_300


def test_a_port_that_is_taken_is_passed_over(outgoing: Path) -> None:
    taken = free_port()
    with socket.create_server(("127.0.0.1", taken)):
        outgoing.write_text(f"{taken + 1} 60999")
        ports._offered.clear()
        ports._offered.update(range(10_000, taken))
        assert free_port() > taken, "none was left, so the system chose one"


@pytest.mark.parametrize("said", ["", "none", None])
def test_without_a_known_range_the_usual_one_is_avoided(said: str | None, outgoing: Path) -> None:
    if said is not None:
        outgoing.write_text(said)
    assert 10_000 <= free_port() < 32768


def test_a_claimed_port_can_be_listened_on() -> None:
    port = claim_port("127.0.0.1", 0, "--port")
    assert claim_port("127.0.0.1", port, "--port") == port
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(CommandError, match=f"port {port}.*--port"),
    ):
        claim_port("127.0.0.1", port, "--port")


@pytest.mark.parametrize("port", [0, 8000])
@pytest.mark.parametrize("host", ["192.0.2.1", "999.1.1.1"])
def test_a_host_of_another_machine_is_named(host: str, port: int) -> None:
    with pytest.raises(CommandError, match=rf"{re.escape(host)} port {port}: .* --grpc-host$"):
        claim_port(host, port, "--grpc-port")
