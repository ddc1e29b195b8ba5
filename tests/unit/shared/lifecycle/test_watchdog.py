"""The watchdog: it reports a stall and its end; a stall that lasts is fatal."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from pagewire.lifecycle.watchdog import StalledError, Watchdog, Watched, event_loop
from pagewire.worker.protocol.queue_thread import QueueThread
from support.waiting import eventually, until


class Reports:
    """A watchdog's reports and number of polls."""

    def __init__(self) -> None:
        self.changes: list[bool] = []
        self.fatal: list[BaseException] = []
        self.polls = 0

    def watch(self, watched: Watched, seconds: float) -> Watchdog:
        def busy() -> bool:
            self.polls += 1
            return watched.busy()

        counted = replace(watched, busy=busy)
        return Watchdog([counted], seconds, self.fatal.append, self.changes.append)


def test_a_long_call_is_reported_with_its_stack_and_so_is_its_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reports, release = Reports(), threading.Event()
    thread = QueueThread("launcher", reports.fatal.append)
    watchdog = reports.watch(thread.watched(), seconds=0.4)
    until(lambda: reports.polls > 8)  # more than until a busy thread is fatal
    assert (reports.changes, reports.fatal) == ([], [])
    thread.post(lambda: release.wait(10))
    until(lambda: reports.changes == [False], 0.8 + 2)
    stacks = capfd.readouterr().err
    assert "most recent call first" in stacks
    assert "test_watchdog.py" in stacks
    release.set()
    until(lambda: reports.changes == [False, True])
    watchdog.close()
    thread.close()
    assert reports.fatal == []


def test_a_slow_call_is_reported_until_it_ends() -> None:
    reports, slow, release = Reports(), [], threading.Event()
    thread = QueueThread("launcher", reports.fatal.append)
    watchdog = Watchdog(
        [thread.watched()],
        60.0,
        reports.fatal.append,
        reports.changes.append,
        slow_seconds=0.2,
        on_slow=slow.append,
    )
    thread.post(lambda: release.wait(10))
    until(lambda: slow == [True])
    release.set()
    until(lambda: slow == [True, False])
    watchdog.close()
    thread.close()
    assert (reports.changes, reports.fatal) == ([], [])


def test_twice_the_time_is_fatal() -> None:
    reports, release = Reports(), threading.Event()
    thread = QueueThread("launcher", reports.fatal.append)
    thread.post(lambda: release.wait(10))
    watchdog = reports.watch(thread.watched(), seconds=0.2)
    until(lambda: reports.fatal)
    assert isinstance(reports.fatal[0], StalledError)
    assert "the launcher has made no progress for 0.4 s" in str(reports.fatal[0])
    release.set()
    watchdog.close()
    thread.close()


def test_many_short_calls_are_no_stall() -> None:
    reports = Reports()
    thread = QueueThread("launcher", reports.fatal.append)
    watchdog = reports.watch(thread.watched(), seconds=0.4)
    for _ in range(60):
        thread.post(lambda: time.sleep(0.02))
    thread.close()
    watchdog.close()
    assert reports.polls > 8
    assert reports.changes == []


async def test_a_blocked_event_loop_is_reported() -> None:
    reports = Reports()
    watchdog = reports.watch(event_loop(asyncio.get_running_loop()), seconds=0.4)
    await eventually(lambda: reports.polls > 8)
    assert reports.changes == []
    time.sleep(0.75)  # noqa: ASYNC251 - that is the fault
    await eventually(lambda: reports.changes == [False, True])
    watchdog.close()
    assert reports.fatal == []
