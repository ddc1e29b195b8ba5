"""What the chaos tests have in common: a run that is left alone, and what one that was not must be
like."""

import asyncio
import itertools
import math
import re
import time
from collections import Counter

from support.clients.load import Answer, Load, Question, differences
from support.processes.fleet import Fleet

CLIENTS = 48


async def undisturbed(fleet: Fleet, asked: list[Question]) -> list[Answer]:
    """What the fleet answers when it is left alone."""
    answers = await Load(fleet.urls, asked, CLIENTS).run()
    errors = [a.error for a in answers if a.error is not None]
    assert errors == [], errors
    return answers


async def rest(fleet: Fleet, workers: int, seconds: float = 40.0) -> None:
    """Waits until every worker is back and nothing is held any more; prints the loop lag."""
    deadline = time.monotonic() + seconds
    while not await fleet.at_rest(workers):
        assert time.monotonic() < deadline, (await fleet.loads(), fleet.log[-40:])
        await asyncio.sleep(0.2)
    report_loop_lag(fleet)


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


def report_loop_lag(fleet: Fleet) -> None:
    """Prints how late the event loops were since each process started, by kind and cause."""
    for kind in ("gateway", "scheduler", "worker"):
        found = [fleet.samples(name) for name in fleet.names(kind)]
        for cause in ("loop", "machine"):
            buckets: Counter[float] = Counter()  # by upper bound, each with those below it
            for samples in found:
                for name, value in samples.items():
                    match = re.fullmatch(
                        rf'pagewire_loop_lag_seconds_bucket{{cause="{cause}",le="(.*)"}}', name
                    )
                    if match:
                        buckets[float(match[1])] += int(value)
            longest = max(s[f'pagewire_loop_lag_max_seconds{{cause="{cause}"}}'] for s in found)
            bounds = sorted(buckets)
            late = [
                f"{buckets[above] - buckets[below]} over {below * 1000:g} ms"
                for below, above in itertools.pairwise(bounds)
                if buckets[above] > buckets[below]
            ]
            print(
                f"loop lag of {len(found)} {kind} processes by the {cause}: {buckets[math.inf]} "
                f"calls, {', '.join(late) or 'none over 1 ms'}, at most {longest * 1000:.0f} ms"
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
