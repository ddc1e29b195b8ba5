"""The supervisor, with small real processes as services."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pagewire.cli.errors import CommandError
from pagewire.cli.launch import supervisor as supervisor_module
from pagewire.cli.launch.ports import free_port
from pagewire.cli.launch.processes import ChildProcess
from pagewire.cli.launch.supervisor import SUPERVISOR, Service, Supervisor, running
from support.waiting import eventually, until

# Answers health checks; notes when it ends in a file; ignores SIGTERM when told to.
SERVER = """
import http.server, signal, sys, time
from pagewire.parent_process import end_with_supervisor

end_with_supervisor()
port, notes, stubborn = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "stubborn"

def end(*_):
    with open(notes, "a") as file:
        print(sys.argv[4], file=file)
    if not stubborn:
        sys.exit(0)

signal.signal(signal.SIGTERM, end)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Services:
    """Makes services and keeps what the supervisor reports about them."""

    def __init__(self, folder: Path) -> None:
        self.notes = folder / "notes"
        self.notes.touch()
        self.script = folder / "server.py"
        self.script.write_text(SERVER)
        self.reported: list[tuple[str, str]] = []

    def server(self, name: str, grace: float = 20.0, stubborn: bool = False) -> Service:
        port = free_port()
        manner = "stubborn" if stubborn else "polite"
        command = (sys.executable, str(self.script), str(port), str(self.notes), manner, name)
        return Service(name, command, f"http://127.0.0.1:{port}/", grace)

    def command(self, name: str, code: str) -> Service:
        return Service(name, (sys.executable, "-c", code), "http://127.0.0.1:9/", 5.0)

    def report(self, name: str, line: str) -> None:
        self.reported.append((name, line))

    def count(self, line: str) -> int:
        """How often the supervisor said this line."""
        return self.reported.count((SUPERVISOR, line))


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return Services(tmp_path)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_all_run_until_the_end_and_end_from_last_tier_to_first(services: Services) -> None:
    tiers = [[services.server("a"), services.server("b")], [services.server("c")]]
    supervisor = Supervisor(tiers, services.report)
    async with running(supervisor):
        pids = supervisor.pids
        assert set(pids) == {"a", "b", "c"}
        assert all(os.getpgid(pid) == pid for pid in pids.values())
        assert ("a", "serving") in services.reported
    assert not any(map(is_running, pids.values()))
    ended = services.notes.read_text().split()
    assert ended[0] == "c"
    assert sorted(ended[1:]) == ["a", "b"]


async def test_one_that_fails_to_start_ends_all_and_is_quoted(services: Services) -> None:
    bad = services.command("bad", "import sys; sys.exit('no such model: x')")
    supervisor = Supervisor([[services.server("good")], [bad]], services.report)
    with pytest.raises(CommandError) as caught:
        await supervisor.start()
    assert "bad ended with exit status 1 before it was ready" in str(caught.value)
    assert "no such model: x" in str(caught.value)
    assert supervisor.pids == {}


async def test_one_that_dies_while_others_start_is_noticed(services: Services) -> None:
    early = services.server("early")
    slow = services.command("slow", "import time; time.sleep(60)")
    supervisor = Supervisor([[early], [slow]], services.report)
    starting = asyncio.create_task(supervisor.start())
    await eventually(lambda: ("early", "serving") in services.reported, 20)
    await asyncio.sleep(0.3)
    os.kill(supervisor.pids["early"], signal.SIGKILL)
    with pytest.raises(CommandError, match="early was ended by SIGKILL"):
        await asyncio.wait_for(starting, 20)
    assert supervisor.pids == {}


async def test_one_that_dies_is_started_again_with_growing_delays(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_RESTART_DELAY", 0.05)
    supervisor = Supervisor([[services.server("a")]], services.report)
    pids = []
    async with running(supervisor):
        for restart in (1, 2, 3):
            pids.append(supervisor.pids["a"])
            os.kill(pids[-1], signal.SIGKILL)
            await eventually(lambda n=restart: services.count("a is ready again") == n, 20)
        pids.append(supervisor.pids["a"])
    assert services.count("a was ended by SIGKILL; starting it again") == 1, "it was sound"
    assert services.count("a was ended by SIGKILL; starting it again in 0.05 s") == 1
    assert services.count("a was ended by SIGKILL; starting it again in 0.1 s") == 1
    assert len(set(pids)) == 4
    assert not any(map(is_running, pids))


def test_one_that_served_waits_less_for_its_restart() -> None:
    served = [supervisor_module.restart_delay(ends, True) for ends in range(5)]
    assert served == [0, 1, 2, 2, 2]
    never_ready = [supervisor_module.restart_delay(ends, False) for ends in range(8)]
    assert never_ready == [0, 1, 2, 4, 8, 16, 30, 30]


async def test_a_machine_that_cannot_start_a_process_is_asked_again(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_RESTART_DELAY", 0.05)
    supervisor = Supervisor([[services.server("a")]], services.report)
    start = ChildProcess.start

    async def fail_once(*_: object) -> ChildProcess:
        monkeypatch.setattr(ChildProcess, "start", start)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async with running(supervisor):
        monkeypatch.setattr(ChildProcess, "start", fail_once)
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await eventually(lambda: services.count("a is ready again") == 1, 20)
    said = "a cannot be started: [Errno 11] Resource temporarily unavailable"
    assert services.count(said) == 1


async def test_stopping_while_one_waits_for_its_restart(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_SERVED_DELAY", 60.0)
    monkeypatch.setattr(supervisor_module, "FIRST_RESTART_DELAY", 60.0)
    said = "a was ended by SIGKILL; starting it again in 60 s"
    supervisor = Supervisor([[services.server("a")]], services.report)
    async with running(supervisor):
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await eventually(lambda: services.count("a is ready again") == 1, 20)
        os.kill(supervisor.pids["a"], signal.SIGKILL)
        await eventually(lambda: services.count(said) == 1, 20)
    assert supervisor.pids == {}


async def test_one_that_ignores_sigterm_is_killed_after_its_grace(services: Services) -> None:
    supervisor = Supervisor([[services.server("a", 0.3, stubborn=True)]], services.report)
    async with running(supervisor):
        pid = supervisor.pids["a"]
        started = time.monotonic()
    assert 0.3 <= time.monotonic() - started < 10
    assert services.notes.read_text().split() == ["a"]
    assert not is_running(pid)


async def test_what_a_child_leaves_in_its_group_ends_with_it() -> None:
    code = """
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(250)"]).pid)
    """
    lines: list[str] = []
    child = await ChildProcess.start(
        [sys.executable, "-c", textwrap.dedent(code)], {}, lines.append
    )
    async with asyncio.timeout(20):  # the grandchild holds the pipe for much longer
        assert await child.wait() == 0
    assert not child.running
    await eventually(lambda: not is_running(int(lines[0])))


async def test_lines_of_any_length_and_bytes_are_passed_on() -> None:
    code = r"import sys; sys.stdout.buffer.write(b'x' * (3 << 20) + b'\n\xff\nlast')"
    lines: list[str] = []
    child = await ChildProcess.start([sys.executable, "-c", code], {}, lines.append)
    assert await child.wait() == 0
    assert lines[-2:] == ["\N{REPLACEMENT CHARACTER}", "last"]
    assert list(child.tail) == lines


def test_children_die_with_a_supervisor_that_is_killed(services: Services) -> None:
    service = services.server("a")
    code = f"""
        import asyncio
        from pagewire.cli.launch.supervisor import Service, Supervisor

        async def main():
            supervisor = Supervisor([[{service!r}]], lambda name, line: None)
            await supervisor.start()
            print(supervisor.pids["a"], flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not is_running(child))
