"""One program: its start, its ends, and the handling of its lines."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagewire.worker.command import program as module
from pagewire.worker.command.messages import NonsenseError
from pagewire.worker.command.program import Program, restart_delay
from support.waiting import until

READY = 'print(\'{"type": "ready"}\', flush=True)'


@contextmanager
def running(
    tmp_path: Path,
    script: str,
    on_line: Callable[[bytes], None] = lambda _: None,
    start_seconds: float = 30.0,
):
    """A program of some lines of Python, and the reasons of its ends."""
    path = tmp_path / "program.py"
    path.write_text(script)
    ends: list[str] = []
    program = Program([sys.executable, str(path)], start_seconds, on_line, ends.append)
    try:
        yield program, ends
    finally:
        program.close()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('no model here')", "exit status 1; its last lines: no model here"),
        ("print(1)", "nonsense: '1' is not a JSON object"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    ],
)
def test_a_start_that_fails_says_why(tmp_path, script, message):
    with running(tmp_path, script) as (program, ends):
        with pytest.raises(RuntimeError, match=message):
            program.start()
        assert not ends


def test_a_start_that_takes_too_long_is_ended(tmp_path):
    script = "import time; time.sleep(60)"
    message = r"wrote no first line within 0\.5 s"
    started = running(tmp_path, script, start_seconds=0.5)
    with started as (program, _), pytest.raises(RuntimeError, match=message):
        program.start()


def test_lines_go_both_ways(tmp_path):
    script = f"import sys\n{READY}\nfor line in sys.stdin: print(line.strip() * 2, flush=True)"
    lines: list[bytes] = []
    with running(tmp_path, script, lines.append) as (program, _):
        program.send(b"before its start\n")
        program.start()
        program.send(b"after\n")
        until(lambda: len(lines) == 2, 10)
    assert lines == [b"before its startbefore its start\n", b"afterafter\n"]


def test_it_is_started_again_and_lines_go_to_the_next_process(tmp_path):
    script = f"import os, sys\n{READY}\nfor line in sys.stdin: print(os.getpid(), flush=True)"
    lines: list[bytes] = []
    with running(tmp_path, script, lines.append) as (program, ends):
        program.start()
        program.send(b"one\n")
        until(lambda: len(lines) == 1, 10)
        program.restart("was told to")
        until(lambda: ends, 10)
        program.send(b"two\n")
        until(lambda: len(lines) == 2, 10)
    assert ends[0] == "the program was told to"
    assert lines[0] != lines[1]


def test_lines_before_an_end_are_handled_before_it(tmp_path):
    seen: list[str] = []
    script = f"import time\n{READY}\nprint(1)\nprint(2, flush=True)\ntime.sleep(0.2)"
    path = tmp_path / "program.py"
    path.write_text(script)
    program = Program(
        [sys.executable, str(path)],
        10.0,
        lambda line: seen.append(line.decode().strip()),
        lambda reason: seen.append(reason),
    )
    program.start()
    until(lambda: len(seen) >= 3, 10)
    program.close()
    assert seen[:3] == ["1", "2", "the program ended with exit status 0"]


def test_nonsense_ends_it(tmp_path):
    def refuse(line: bytes) -> None:
        raise NonsenseError("that makes no sense")

    script = f"import time\n{READY}\nprint('x', flush=True)\ntime.sleep(60)"
    with running(tmp_path, script, refuse) as (program, ends):
        program.start()
        until(lambda: ends, 10)
    assert ends[0] == "the program wrote nonsense: that makes no sense"


def test_a_line_without_end_is_nonsense(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    script = f"import time\n{READY}\nprint('x' * 5000, flush=True)\ntime.sleep(60)"
    with running(tmp_path, script) as (program, ends):
        program.start()
        until(lambda: ends, 10)
    assert "more than 1000 bytes" in ends[0]


def test_a_program_that_reads_nothing_holds_up_no_sender(tmp_path):
    script = f"import time\n{READY}\ntime.sleep(60)"
    with running(tmp_path, script) as (program, _):
        program.start()
        began = time.monotonic()
        for _ in range(100):
            program.send(b"x" * 100_000 + b"\n")
        assert time.monotonic() - began < 1.0


def test_it_ends_with_the_thread_that_started_it_and_by_close(tmp_path):
    script = f"import time\n{READY}\ntime.sleep(60)"
    with running(tmp_path, script) as (program, ends):
        program.start()
        pid = program.pid
        assert Path(f"/proc/{pid}").exists()
    until(lambda: not Path(f"/proc/{pid}").exists(), 10)
    assert not ends
    assert not [t for t in threading.enumerate() if t.name == "program" and t.is_alive()]


def test_delays_grow_to_a_maximum():
    assert [restart_delay(ends) for ends in range(5)] == [0, 0.5, 1, 2, 4]
    assert restart_delay(100) == 5
