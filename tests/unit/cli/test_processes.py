"""Child processes: their output, and what they leave behind."""

import asyncio
import sys
import textwrap
from pathlib import Path

from pagewire.cli.launch.processes import ChildProcess
from support.waiting import eventually


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_processes_in_the_group_of_a_child_end_with_it() -> None:
    code = """
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(250)"]).pid)
    """
    lines: list[str] = []
    child = await ChildProcess.start(
        [sys.executable, "-c", textwrap.dedent(code)], {}, lines.append
    )
    async with asyncio.timeout(20):  # the grandchild holds the pipe open
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
