"""Checks that the chaos tests share: a run with faults must return the answers of an undisturbed
one, and the fleet must be idle after it."""

import asyncio
import itertools
import math
import re
import time
from collections import Counter

from support.clients.load import Answer, Load, Question, differences
from support.processes.fleet import Fleet

CLIENTS = 48
FULL_SIZE = 400  # requests of a test in a long run, such as `make chaos`


async def undisturbed(fleet: Fleet, asked: list[Question], clients: int = CLIENTS) -> list[Answer]:
    """The answers of a fleet without faults."""
    answers = await Load(fleet.urls, asked, clients).run()
    errors = [a.error for a in answers if a.error is not None]
    assert errors == [], errors
    return answers


async def until_idle(fleet: Fleet, workers: int, seconds: float = 40.0) -> None:
    """Waits until `workers` workers are ready and no request is open; prints the loop lag."""
    deadline = time.monotonic() + seconds
    while not await fleet.is_idle(workers):
        assert time.monotonic() < deadline, (await fleet.loads(), fleet.log[-40:])
        await asyncio.sleep(0.2)
    report_loop_lag(fleet)


def figures(asked: list[Question], got: list[Answer], want: list[Answer]) -> dict[str, float]:
    """The figures of a run, compared with the undisturbed one.

    `lost` and `twice` count characters, for clients that read their whole answer.
    """
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
    """Prints the figures of a run; `pytest -s` shows them."""
    f = figures(asked, got, want)
    print(
        f"\n{name}: {f['streams']} streams, {f['tokens']} tokens, {f['failed']} failed, "
        f"{f['lost']} characters lost, {f['twice']} twice, longest pause "
        f"{f['longest_pause_s']:.2f} s (undisturbed {f['undisturbed_s']:.2f} s)"
    )


def report_loop_lag(fleet: Fleet) -> None:
    """Prints how late event loops were since their processes started, by service and cause."""
    for kind in ("gateway", "scheduler", "worker"):
        found = [fleet.samples(name) for name in fleet.names(kind)]
        for cause in ("loop", "machine"):
            buckets: Counter[float] = Counter()  # by upper bound, cumulative
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


def check_answers(
    fleet: Fleet,
    asked: list[Question],
    got: list[Answer],
    want: list[Answer],
    tolerance: float = 0.0,
) -> None:
    """AssertionError if an answer differs from that of the undisturbed run."""
    found = differences(asked, got, want, tolerance)
    assert found == [], "\n".join([*found[:5], *fleet.log[-60:]])
