"""The embedded model with torch operations in float32: faults do not change its answers."""

import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.children import running
from support.clients.load import Answer
from support.processes.fleet import Fleet, running_fleet
from support.processes.fleet_checks import undisturbed
from support.processes.real_model import (
    CLIENTS,
    WORKER,
    constrained_questions,
    mask_processes,
    questions,
    run_with_fault,
)

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_workers() -> AsyncIterator[Fleet]:
    async with running_fleet(workers=2, worker_command=WORKER) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed_answers(two_workers: Fleet) -> list[Answer]:
    """The answers to 24 questions."""
    return await undisturbed(two_workers, questions(24), CLIENTS)


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("worker-0", signal.SIGKILL),
        ("worker-0", signal.SIGSTOP),
        ("scheduler-0", signal.SIGKILL),
    ],
)
async def test_answers_equal_those_of_an_undisturbed_run(
    two_workers: Fleet, undisturbed_answers: list[Answer], victim: str, number: signal.Signals
) -> None:
    asked = questions(len(undisturbed_answers))
    await run_with_fault(two_workers, asked, undisturbed_answers, victim, number)


# The last bits, which depend on the batch, decide between two FP8 numbers.
@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [((), 1e-4), (("--kv-cache-dtype=fp8",), 0.05)],
    ids=["plain", "fp8 KV"],
)
async def test_the_only_worker_with_the_real_model_is_killed_and_returns(
    flags: tuple[str, ...], tolerance: float
) -> None:
    async with running_fleet(workers=1, worker_command=(*WORKER, *flags)) as fleet:
        asked = questions(12)
        want = await undisturbed(fleet, asked, CLIENTS)
        await run_with_fault(fleet, asked, want, "worker-0", signal.SIGKILL, tolerance)


async def test_constrained_answers_equal_those_of_an_undisturbed_run(two_workers: Fleet) -> None:
    """Matchers are rebuilt from the tokens, on another worker and by another scheduler."""
    asked = constrained_questions(12)
    want = await undisturbed(two_workers, asked, CLIENTS)
    assert any(answer.finish_reasons[0] == "stop" for answer in want)
    for victim in ("worker-1", "scheduler-0"):
        await run_with_fault(two_workers, asked, want, victim, signal.SIGKILL)


async def test_a_worker_ends_with_its_mask_process_and_its_sequences_go_on(
    two_workers: Fleet,
) -> None:
    asked = constrained_questions(12)
    want = await undisturbed(two_workers, asked, CLIENTS)
    for which in (0, 1):
        victim = two_workers.supervisor.pids["worker-0"]
        processes = mask_processes(victim)
        await run_with_fault(
            two_workers, asked, want, "worker-0", signal.SIGKILL, mask_process=which
        )
        assert two_workers.supervisor.pids["worker-0"] != victim
        assert not any(running(pid) for pid in processes)
