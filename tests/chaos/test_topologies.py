"""Processes stop permanently while one worker and its scheduler stay: all streams continue there,
within a stated time."""

import asyncio
from itertools import combinations

import pytest

from support.clients.load import Load, questions
from support.processes.fleet import running_fleet
from support.processes.fleet_checks import (
    CLIENTS,
    check_answers,
    figures,
    report,
    undisturbed,
    until_idle,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

HAND_BACK_AFTER = 2.0  # the scheduler's default
# To detect a broken connection, resend requests and recompute them, on a busy machine.
SLACK = 4.0

Stopped = tuple[str, ...]


def subsets_that_leave_a_path(workers: int, schedulers: int) -> list[Stopped]:
    """All subsets of processes whose end leaves a scheduler with a worker.

    Worker N belongs to scheduler N modulo their number.
    """
    names = [f"worker-{n}" for n in range(workers)] + [f"scheduler-{n}" for n in range(schedulers)]
    paths = [(f"worker-{n}", f"scheduler-{n % schedulers}") for n in range(workers)]
    return [
        stopped
        for size in range(1, len(names))
        for stopped in combinations(names, size)
        if any(not {*path} & {*stopped} for path in paths)
    ]


# `make test` tries one of each kind of subset.
SOME: dict[str, list[Stopped]] = {
    "one scheduler, three workers": [("worker-0",), ("worker-0", "worker-1")],
    "two schedulers, a worker each": [
        ("worker-0",),
        ("scheduler-0",),
        ("worker-0", "scheduler-0"),
    ],
    "two schedulers, two workers each": [
        ("worker-0", "worker-2", "worker-3"),
        ("worker-1", "scheduler-0"),
    ],
}


@pytest.mark.parametrize(
    ("name", "workers", "schedulers"),
    [
        ("one scheduler, three workers", 3, 1),
        ("two schedulers, a worker each", 2, 2),
        ("two schedulers, two workers each", 4, 2),
    ],
)
async def test_streams_continue_while_a_path_is_left(
    name: str, workers: int, schedulers: int, is_full_size: bool
) -> None:
    all_subsets = subsets_that_leave_a_path(workers, schedulers)
    chosen = all_subsets if is_full_size else SOME[name]
    assert {*chosen} <= {*all_subsets}
    asked = questions(48)
    async with running_fleet(workers, schedulers) as fleet:
        want = await undisturbed(fleet, asked)
        for stopped in chosen:
            load = Load(fleet.urls, asked, CLIENTS)
            running = asyncio.create_task(load.run())
            await load.reached(len(asked) // 8)
            for victim in stopped:
                fleet.stop_permanently(victim)
            got = await running
            report(f"{name}; stopped: {', '.join(stopped)}", asked, got, want)
            check_answers(fleet, asked, got, want)
            found = figures(asked, got, want)
            bound = found["undisturbed_s"] + HAND_BACK_AFTER + SLACK
            assert found["longest_pause_s"] < bound, "streams must not wait for stopped processes"
            await fleet.start_again(*stopped)
            await until_idle(fleet, workers)


async def test_a_machine_restarts_and_new_requests_wait() -> None:
    """The only scheduler and its only worker restart together: no request fails."""
    asked = questions(24)
    async with running_fleet(workers=1) as fleet:
        want = await undisturbed(fleet, asked)
        for name in ("worker-0", "scheduler-0"):
            fleet.stop_permanently(name)
        load = Load(fleet.urls, asked, CLIENTS)
        running = asyncio.create_task(load.run())
        while fleet.metric("gateway-0", "pagewire_gateway_open_requests") < len(asked):
            await asyncio.sleep(0.05)
        assert load.done == 0
        await fleet.start_again("worker-0", "scheduler-0")
        got = await running
        report("scheduler and worker restarted together", asked, got, want)
        check_answers(fleet, asked, got, want)
