"""What the chaos tests have in common: a run that is left alone, and what one that was not must be
like."""

import asyncio
import time

from support.fleet import Fleet
from support.load import Answer, Load, Question, differences

CLIENTS = 48


async def undisturbed(fleet: Fleet, asked: list[Question]) -> list[Answer]:
    """What the fleet answers when it is left alone."""
    answers = await Load(fleet.urls, asked, CLIENTS).run()
    assert [a.error for a in answers if a.error is not None] == []
    return answers


async def rest(fleet: Fleet, workers: int, seconds: float = 40.0) -> None:
    """Waits until every worker is back and nothing is held any more."""
    deadline = time.monotonic() + seconds
    while not await fleet.at_rest(workers):
        assert time.monotonic() < deadline, (await fleet.loads(), fleet.log[-40:])
        await asyncio.sleep(0.2)


def report(name: str, answers: list[Answer], want: list[Answer]) -> None:
    """Prints the figures of a run; pytest shows them with -s."""
    pauses = [sorted(answer.pause for answer in run)[-1] for run in (answers, want)]
    tokens = sum(answer.tokens for answer in answers)
    failed = sum(answer.error is not None for answer in answers)
    print(
        f"\n{name}: {len(answers)} streams, {tokens} tokens, {failed} failed, "
        f"longest pause {pauses[0]:.2f} s (undisturbed {pauses[1]:.2f} s)"
    )


def check(
    fleet: Fleet,
    asked: list[Question],
    got: list[Answer],
    want: list[Answer],
    tolerance: float = 0.0,
) -> None:
    """Every answer is that of the undisturbed run; otherwise the first differences and the log."""
    found = differences(asked, got, want, tolerance)
    assert found == [], "\n".join([*found[:5], *fleet.log[-60:]])
