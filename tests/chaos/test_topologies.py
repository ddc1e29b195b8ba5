"""Processes end for good, in every way that leaves one worker with a scheduler: every stream goes
on there, within a stated time."""

import asyncio
from itertools import combinations

import pytest

from support.clients.load import Load, questions
from support.processes.fleet import running_fleet
from support.processes.trial import CLIENTS, check, figures, report, rest, undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

HAND_BACK_AFTER = 2.0  # the scheduler's default
# Beyond that: until a broken connection is noticed, requests are sent again and computed anew, on a
# machine that is busy.
SLACK = 4.0

Deaths = tuple[str, ...]


def deaths_that_leave_a_path(workers: int, schedulers: int) -> list[Deaths]:
    """All subsets of processes without which some scheduler still has a worker: worker N is one of
    scheduler N modulo their number."""
    names = [f"worker-{n}" for n in range(workers)] + [f"scheduler-{n}" for n in range(schedulers)]
    paths = [(f"worker-{n}", f"scheduler-{n % schedulers}") for n in range(workers)]
    return [
        dead
        for size in range(1, len(names))
        for dead in combinations(names, size)
        if any(not {*path} & {*dead} for path in paths)
    ]


# Every day: of subsets that are alike, one.
SOME: dict[str, list[Deaths]] = {
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
async def test_streams_go_on_where_a_path_is_left(
    name: str, workers: int, schedulers: int, requests: int
) -> None:
    everything = deaths_that_leave_a_path(workers, schedulers)
    chosen = everything if requests >= 400 else SOME[name]
    assert {*chosen} <= {*everything}
    asked = questions(48)
    async with running_fleet(workers, schedulers) as fleet:
        want = await undisturbed(fleet, asked)
        for dead in chosen:
            load = Load(fleet.urls, asked, CLIENTS)
            running = asyncio.create_task(load.run())
            await load.reached(len(asked) // 8)
            for victim in dead:
                fleet.end_for_good(victim)
            got = await running
            report(f"{name}; for good: {', '.join(dead)}", asked, got, want)
            check(fleet, asked, got, want)
            found = figures(asked, got, want)
            bound = found["undisturbed_s"] + HAND_BACK_AFTER + SLACK
            assert found["longest_pause_s"] < bound, "they have waited for the dead"
            await fleet.bring_back(*dead)
            await rest(fleet, workers)


async def test_a_machine_restarts_and_new_requests_wait() -> None:
    """The only scheduler and its worker are started again together: nobody gets an error."""
    asked = questions(24)
    async with running_fleet(workers=1) as fleet:
        want = await undisturbed(fleet, asked)
        for name in ("worker-0", "scheduler-0"):
            fleet.end_for_good(name)
        load = Load(fleet.urls, asked, CLIENTS)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(1)
        assert load.done == 0
        await fleet.bring_back("worker-0", "scheduler-0")
        got = await running
        report("scheduler and worker restarted together", asked, got, want)
        check(fleet, asked, got, want)
