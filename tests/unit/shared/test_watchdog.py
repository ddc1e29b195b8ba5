"""The watchdog: what stands still is noticed, what moves again too; what never will is fatal."""

import asyncio
import threading
import time

import pytest

from pagewire.lifecycle.watchdog import StalledError, Watchdog, Watched, event_loop
from pagewire.worker.protocol.queue_thread import QueueThread
from support.waiting import until


class Told:
    """What a watchdog has said."""

    def __init__(self) -> None:
        self.changes: list[bool] = []
        self.fatal: list[BaseException] = []

    def watch(self, *watched: Watched, seconds: float) -> Watchdog:
        return Watchdog(watched, seconds, self.fatal.append, self.changes.append)


def test_a_long_call_is_noticed_with_its_stack_and_so_is_its_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told, release = Told(), threading.Event()
    thread = QueueThread("launcher", told.fatal.append)
    watchdog = told.watch(thread.watched(), seconds=0.4)
    time.sleep(0.8)
    assert told.changes == []  # an idle thread may stand still
    thread.post(lambda: release.wait(10))
    until(lambda: told.changes == [False], 0.8 + 2)
    stacks = capfd.readouterr().err
    assert "most recent call first" in stacks
    assert "test_watchdog.py" in stacks
    release.set()
    until(lambda: told.changes == [False, True])
    watchdog.close()
    thread.close()
    assert told.fatal == []


def test_a_call_that_takes_some_time_is_doubted_until_it_ends() -> None:
    told, doubts, release = Told(), [], threading.Event()
    thread = QueueThread("launcher", told.fatal.append)
    watchdog = Watchdog(
        [thread.watched()],
        60.0,
        told.fatal.append,
        told.changes.append,
        doubt_seconds=0.2,
        on_doubt=doubts.append,
    )
    thread.post(lambda: release.wait(10))
    until(lambda: doubts == [True])
    release.set()
    until(lambda: doubts == [True, False])
    watchdog.close()
    thread.close()
    assert (told.changes, told.fatal) == ([], [])


def test_twice_the_time_is_fatal() -> None:
    told, release = Told(), threading.Event()
    thread = QueueThread("launcher", told.fatal.append)
    thread.post(lambda: release.wait(10))
    watchdog = told.watch(thread.watched(), seconds=0.2)
    until(lambda: told.fatal)
    assert isinstance(told.fatal[0], StalledError)
    assert "the launcher has not moved for 0.4 s" in str(told.fatal[0])
    release.set()
    watchdog.close()
    thread.close()


def test_many_short_calls_are_no_stall() -> None:
    told = Told()
    thread = QueueThread("launcher", told.fatal.append)
    watchdog = told.watch(thread.watched(), seconds=0.4)
    for _ in range(60):
        thread.post(lambda: time.sleep(0.02))
    thread.close()
    watchdog.close()
    assert told.changes == []


async def test_a_blocked_event_loop_is_noticed() -> None:
    told = Told()
    watchdog = told.watch(event_loop(asyncio.get_running_loop()), seconds=0.4)
    await asyncio.sleep(0.8)
    assert told.changes == []
    time.sleep(0.75)  # noqa: ASYNC251 - that is the fault
    await asyncio.sleep(0.3)
    watchdog.close()
    assert told.changes == [False, True]
