"""Helper pools, with real processes that answer, refuse, end, hang, or are no longer needed."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagewire.errors import Code, RequestError
from pagewire.helpers.pool import GRACE_SECONDS, RESTART_SECONDS, HelperError, HelperPool
from support.waiting import eventually, until

TARGET = "support.helper_targets:commands"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper processes can import `support`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


@contextlib.asynccontextmanager
async def running(
    size: int = 1, seconds: float = 20.0, outcomes: list[str] | None = None
) -> AsyncIterator[HelperPool]:
    def observe(outcome: str, _seconds: float) -> None:
        if outcomes is not None:
            outcomes.append(outcome)

    pool = HelperPool("tests", TARGET, "hello ", size=size, timeout=seconds, observe=observe)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def begun(
    pool: HelperPool, path: Path, seconds: float, large: bool = False
) -> asyncio.Task[bytes]:
    """A task of some seconds that a helper has begun."""
    task = asyncio.create_task(pool.run(f"begin {path} {seconds}".encode(), large=large))
    await eventually(path.exists, 20)
    return task


async def test_tasks_are_answered_in_another_process() -> None:
    async with running() as pool:
        assert await pool.run(b"echo you") == b"hello you"
        pid = int(await pool.run(b"pid"))
        assert pid != os.getpid()
        assert int(await pool.run(b"pid")) == pid
    assert not is_running(pid)


async def test_sixteen_megabytes_there_and_back() -> None:
    data = os.urandom(16 << 20)
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - began)

    async with running() as pool:
        await pool.run(b"pid")
        watching = asyncio.create_task(watch())
        assert await pool.run(b"echo " + data, large=True) == b"hello " + data
        watching.cancel()
    assert longest < 0.5  # less than 10 ms on an idle machine


async def test_a_refusal_comes_through_whole() -> None:
    outcomes: list[str] = []
    async with running(outcomes=outcomes) as pool:
        with pytest.raises(RequestError) as refused:
            await pool.run(b"refuse")
    assert refused.value == RequestError(Code.INVALID_ARGUMENT, "no such prompt", "prompt")
    assert outcomes == ["refused"]


async def test_an_error_fails_its_own_task_only_and_quotes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as pool:
        pid = await pool.run(b"pid")
        with pytest.raises(HelperError, match="it failed"):
            await pool.run(b"fail a secret prompt")
        assert await pool.run(b"pid") == pid
    assert "KeyError in compute" in caplog.text
    assert "secret" not in caplog.text


async def test_a_helper_that_ends_fails_its_own_task_only() -> None:
    outcomes: list[str] = []
    async with running(outcomes=outcomes) as pool:
        pid = int(await pool.run(b"pid"))
        dying = asyncio.create_task(pool.run(b"die"))
        behind = asyncio.create_task(pool.run(b"echo again"))
        with pytest.raises(HelperError, match="computed it ended"):
            await dying
        assert await behind == b"hello again"
        assert int(await pool.run(b"pid")) != pid
    assert Counter(outcomes) == {"answered": 3, "failed": 1}


async def test_a_helper_that_hangs_fails_its_own_task_only() -> None:
    async with running(seconds=0.5) as pool:
        pid = int(await pool.run(b"pid"))
        with pytest.raises(HelperError, match=r"longer than 0\.5 s"):
            await pool.run(b"sleep 60")
        assert await pool.run(b"echo again") == b"hello again"
        assert not is_running(pid)


async def test_an_idle_helper_that_ends_is_replaced() -> None:
    async with running() as pool:
        pid = int(await pool.run(b"pid"))
        [runner] = pool._runners
        os.kill(pid, 9)
        await eventually(lambda: runner not in pool._runners)
        assert await pool.run(b"echo again") == b"hello again"


async def test_cancelling_a_task_frees_its_helper(tmp_path: Path) -> None:
    async with running() as pool:
        pid = int(await pool.run(b"pid"))
        unwanted = await begun(pool, tmp_path / "unwanted", 60)
        queued = asyncio.create_task(pool.run(b"sleep 61"))
        await eventually(lambda: pool._waiting)
        queued.cancel()
        unwanted.cancel()
        began = time.monotonic()
        assert await pool.run(b"echo next") == b"hello next"
        assert time.monotonic() - began < 15
        assert not is_running(pid)


async def test_a_task_that_ends_soon_after_it_was_cancelled_keeps_its_helper(
    tmp_path: Path,
) -> None:
    async with running() as pool:
        pid = await pool.run(b"pid")
        unwanted = await begun(pool, tmp_path / "unwanted", 0.2)
        unwanted.cancel()
        assert await pool.run(b"pid") == pid


async def test_a_helper_that_is_killed_while_its_answer_arrives_gets_no_other_task(
    tmp_path: Path,
) -> None:
    async with running() as pool:
        unwanted = await begun(pool, tmp_path / "unwanted", 0.2)
        unwanted.cancel()
        await asyncio.sleep(0)
        # The answer and the time to kill the helper arrive in one turn of the event loop.
        time.sleep(2 * GRACE_SECONDS)  # noqa: ASYNC251
        assert await pool.run(b"echo next") == b"hello next"


async def test_large_tasks_leave_one_helper_to_others(tmp_path: Path) -> None:
    async with running(size=2) as pool:
        await asyncio.gather(pool.run(b"sleep 0.1"), pool.run(b"sleep 0.1"))
        large = [await begun(pool, tmp_path / "large", 3, large=True)]
        large += [asyncio.create_task(pool.run(b"sleep 3", large=True)) for _ in range(2)]
        await eventually(lambda: len(pool._waiting) == 2)
        for _ in range(20):
            assert await pool.run(b"echo small") == b"hello small"
        assert not any(task.done() for task in large)
        for task in large:
            task.cancel()


async def test_smaller_tasks_go_first_and_the_oldest_among_equals(tmp_path: Path) -> None:
    ended: list[str] = []

    async def note(pool: HelperPool, name: str, size: int) -> None:
        await pool.run(b"echo " + bytes(size))
        ended.append(name)

    async with running() as pool:
        await pool.run(b"pid")
        first = await begun(pool, tmp_path / "first", 1)
        sizes = {"large": 9000, "older": 600, "newer": 550, "small": 20}
        async with asyncio.TaskGroup() as group:
            for name, size in sizes.items():
                group.create_task(note(pool, name, size))
        await first
    assert ended == ["small", "older", "newer", "large"]


async def test_large_tasks_run_where_there_is_one_helper() -> None:
    async with running() as pool:
        assert await pool.run(b"echo large", large=True) == b"hello large"


async def test_a_helper_that_cannot_start_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    pool = HelperPool("tests", "support.helper_targets:broken", None, size=1, timeout=5)
    await pool.start()
    with caplog.at_level(logging.ERROR):
        waiting = asyncio.create_task(pool.run(b"echo"))
        await eventually(lambda: caplog.text.count("did not start") >= 2, 30)
    await pool.close()
    with pytest.raises(HelperError, match="shutting down"):
        await waiting


async def test_closing_fails_tasks_at_every_stage() -> None:
    """Also a task that a helper has received and not begun."""
    for turns in range(1, 6):
        async with running() as pool:
            await pool.run(b"pid")
            tasks = [asyncio.create_task(pool.run(b"sleep 60")) for _ in range(2)]
            for _ in range(turns):
                await asyncio.sleep(0)
            await pool.close()
            async with asyncio.timeout(5):
                ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(end) for end in ends] == ["tests is shutting down"] * 2
        with pytest.raises(HelperError, match="shutting down"):
            await pool.run(b"pid")


async def test_a_task_cancelled_before_it_began_keeps_its_helper() -> None:
    async with running() as pool:
        pid = await pool.run(b"pid")
        for _ in range(5):
            unwanted = asyncio.create_task(pool.run(b"sleep 60"))
            await asyncio.sleep(0)  # `run` has begun, and its helper has not been woken
            unwanted.cancel()
            assert await pool.run(b"pid") == pid


@pytest.mark.parametrize("turns", range(4))
async def test_a_task_cancelled_as_it_begins_does_not_end_the_next_one(turns: int) -> None:
    async with running() as pool:
        await pool.run(b"echo first")
        unwanted = asyncio.create_task(pool.run(b"echo unwanted"))
        for _ in range(turns):
            await asyncio.sleep(0)
        unwanted.cancel()
        next_one = f"sleep {2 * GRACE_SECONDS}".encode()
        assert await pool.run(next_one)


async def test_without_descriptors_it_tries_again_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def none_left() -> tuple[socket.socket, socket.socket]:
        tried.append(time.monotonic())
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", none_left)
        pool = HelperPool("tests", TARGET, "hello ", size=1, timeout=20)
        await pool.start()
        await eventually(lambda: len(tried) == 2)
    assert tried[1] - tried[0] > 0.9 * RESTART_SECONDS
    assert caplog.text.count("did not start") == 2
    try:
        assert await pool.run(b"echo again") == b"hello again"
    finally:
        await pool.close()


def test_helpers_end_with_their_service() -> None:
    """Even while they compute, when the service is killed."""
    code = (
        "import asyncio\n"
        "from pagewire.helpers.pool import HelperPool\n"
        "async def main():\n"
        f"    pool = HelperPool('tests', {TARGET!r}, '', size=1, timeout=60)\n"
        "    await pool.start()\n"
        "    print((await pool.run(b'pid')).decode(), flush=True)\n"
        "    await pool.run(b'sleep 60')\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        pid = int(service.stdout.readline())
        assert is_running(pid)
        service.kill()
    until(lambda: not is_running(pid), 10)
