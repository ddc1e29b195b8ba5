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


def figures(asked: list[Question], got: list[Answer], want: list[Answer]) -> dict[str, float]:
    """What a run came to, compared with the undisturbed one. What is lost and what came twice is
    counted in characters that clients got, of those that stayed to the end."""
    found = {"streams": len(got), "tokens": sum(answer.tokens for answer in got)}
    found["failed"] = sum(answer.error is not None for answer in got)
    found["lost"] = found["twice"] = 0
    for number, answer in enumerate(got):
        if asked[number % len(asked)].leaves_after is None:
            other = want[number % len(want)]
            more = sum(map(len, answer.texts.values())) - sum(map(len, other.texts.values()))
            found["lost"] += max(0, -more)
            found["twice"] += max(0, more)
    found["longest_pause_s"] = max(answer.pause for answer in got)
    found["undisturbed_s"] = max(answer.pause for answer in want)
    return found


def report(name: str, asked: list[Question], got: list[Answer], want: list[Answer]) -> None:
    """Prints the figures of a run; pytest shows them with -s."""
    f = figures(asked, got, want)
    print(
        f"\n{name}: {f['streams']} streams, {f['tokens']} tokens, {f['failed']} failed, "
        f"{f['lost']} characters lost, {f['twice']} twice, longest pause "
        f"{f['longest_pause_s']:.2f} s (undisturbed {f['undisturbed_s']:.2f} s)"
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
