"""Whatever one client sends, the streams of others go on: no event loop is held for 50 ms.

Run with more rounds, and several requests at once, by `make chaos`. `pytest -s` prints a table.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pagewire.auth.keys import entry_of, new_key
from pagewire.auth.rate_limits import RateLimits
from support.bystanders import Bystanders, Wait, percentile
from support.fleet import SIMULATED, Fleet, running_fleet
from support.hostile_client import HostileClient, hostile_client
from support.hostile_shapes import Outcome, Shape, Target, shapes
from support.loop_lags import LoopLags
from support.trial import report_loop_lag

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

QUIET_SECONDS = 4.0
SETTLE_SECONDS = 0.1  # in which a late effect of a request still counts as its own
HELD_SECONDS = 0.05
PAUSE_SECONDS = 0.1
AT_ONCE = 4
WORKER = (*SIMULATED, "--num-slots=64")
# Longer chunks of prompts would hold up the streams by themselves.
SCHEDULER = ("--max-num-batched-tokens=256", "--max-waiting-seconds=30")


@dataclass(frozen=True)
class Quiet:
    """What bystanders notice when they are alone: what may be added to it is fixed."""

    gap: float
    answer: float

    @classmethod
    def of(cls, bystanders: Bystanders) -> "Quiet":
        """The longest waits to be taken for those of an undisturbed fleet."""
        return cls(_most(bystanders.gaps), _most(bystanders.answers))


def _most(quiet: list[Wait]) -> float:
    longest = max(wait.seconds for wait in quiet)
    return max(longest + PAUSE_SECONDS, 3 * percentile(quiet, 0.99))


@dataclass
class Trial:
    """Sends shapes beside bystanders; `faults` is what was wrong."""

    fleet: Fleet
    bystanders: Bystanders
    client: HostileClient
    quiet: Quiet
    faults: list[str] = field(default_factory=list)
    longest_gap: float = 0.0

    async def send(self, shapes: list[Shape]) -> None:
        """Sends shapes side by side, and looks at what others noticed meanwhile."""
        names = " + ".join(shape.name for shape in shapes)
        before, began = await LoopLags.read(self.fleet), time.monotonic()
        pids = dict(self.fleet.supervisor.pids)
        outcomes = await asyncio.gather(*(self.client.send(shape.name) for shape in shapes))
        await asyncio.sleep(SETTLE_SECONDS)
        ended = time.monotonic()
        if self.fleet.supervisor.pids != pids:
            self.faults.append(f"{names}: a process was lost")
            print(self.faults[-1])
            await self._until_back(pids)
            return
        lags = await LoopLags.read(self.fleet)
        # A chunk comes through all of them.
        stalled = sum(lags.at_most(before, "machine").values())
        gap, late = self._longest(self.bystanders.gaps, began, ended, stalled, self.quiet.gap)
        answer, slow = self._longest(
            self.bystanders.answers, began, ended, stalled, self.quiet.answer
        )
        held = {
            name: seconds
            for name, seconds in lags.at_least(before, "loop").items()
            if seconds >= HELD_SECONDS
        }
        self.longest_gap = max(self.longest_gap, gap)
        faults = [fault for pair in zip(shapes, outcomes, strict=True) for fault in _fault(*pair)]
        faults += [f"{name} was held for {seconds * 1000:.0f} ms" for name, seconds in held.items()]
        if late:
            faults.append(f"a stream stood for {late * 1000:.0f} ms")
        if slow and not any(shape.works for shape in shapes):
            faults.append(f"a small request took {slow * 1000:.0f} ms")
        loops = "  ".join(
            f"{name.rstrip('-0')} {seconds * 1000:3.0f}"
            for name, seconds in lags.at_most(before, "loop").items()
        )
        status = "/".join(str(outcome.status) for outcome in outcomes)
        print(
            f"{names:34.200} {status:>5} {ended - began:6.2f} s  gap {gap * 1000:4.0f}  "
            f"answer {answer * 1000:4.0f}  loop: {loops}  machine {stalled * 1000:3.0f}"
            f"{'  ' + '; '.join(faults) if faults else ''}"
        )
        self.faults += [f"{names}: {fault}" for fault in faults]

    async def _until_back(self, pids: dict[str, int]) -> None:
        """Waits until the fleet has as many processes as it had, and they tell their metrics."""
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError, KeyError):  # it is starting
                    if len(self.fleet.supervisor.pids) == len(pids):
                        await LoopLags.read(self.fleet)
                        return
                await asyncio.sleep(0.2)

    def _longest(
        self, waits: list[Wait], began: float, ended: float, stalled: float, most: float
    ) -> tuple[float, float]:
        """The longest wait in a span, and the longest that the machine does not excuse."""
        longest = inexcusable = 0.0
        for wait in reversed(waits):  # in the order of their ends
            if wait.ended < began:
                break
            if wait.began > ended:
                continue
            longest = max(longest, wait.seconds)
            own = self.bystanders.stall(wait.began, wait.ended)
            if wait.seconds > most + own + stalled:
                inexcusable = max(inexcusable, wait.seconds)
        return longest, inexcusable


def _fault(shape: Shape, outcome: Outcome) -> list[str]:
    fault = shape.fault(outcome)
    return [] if fault is None else [f"it got {fault[:300]}"]


@contextlib.asynccontextmanager
async def guarded_fleet(folder: Path, keyed: bool) -> AsyncIterator[tuple[Fleet, list[str | None]]]:
    """A fleet, and the keys of the bystanders and of the hostile client if it asks for some."""
    keys: list[str | None] = [None, None]
    flags: tuple[str, ...] = ()
    if keyed:
        keys[:] = made = [new_key(), new_key()]
        lines = [entry_of(f"key-{n}", key, None, RateLimits()) for n, key in enumerate(made)]
        (folder / "keys.yaml").write_text("\n".join(lines))
        (folder / "token").write_text(new_key())
        flags = (
            f"--api-keys-file={folder / 'keys.yaml'}",
            f"--scheduler-token-file={folder / 'token'}",
        )
    async with running_fleet(
        workers=1,
        worker_command=WORKER,
        scheduler_flags=(*SCHEDULER, *flags),
        gateway_flags=flags,
        proxied=False,
    ) as fleet:
        yield fleet, keys


@pytest.mark.parametrize("keyed", [False, True], ids=["without keys", "with keys"])
async def test_one_request_holds_nobody(
    tmp_path: Path, requests: int, is_full_size: bool, keyed: bool
) -> None:
    answer_tokens = 1000 if is_full_size else 120
    made = shapes(answer_tokens)
    async with guarded_fleet(tmp_path, keyed) as (fleet, keys):
        pids = dict(fleet.supervisor.pids)
        url = urlsplit(fleet.urls[0])
        assert url.hostname is not None
        assert url.port is not None
        target = Target(url.hostname, url.port, fleet.schedulers[0], keys[1])
        async with hostile_client(target, answer_tokens) as client:
            bystanders = Bystanders(fleet.urls[0], keys[0])
            running = asyncio.create_task(bystanders.run())
            await asyncio.sleep(1.0)  # in which the streams start
            bystanders.gaps.clear()
            bystanders.answers.clear()
            await asyncio.sleep(QUIET_SECONDS)
            quiet = Quiet.of(bystanders)
            print(
                f"\nquiet: streams may stand for {quiet.gap * 1000:.0f} ms, small requests take "
                f"{quiet.answer * 1000:.0f} ms"
            )
            trial = Trial(fleet, bystanders, client, quiet)
            for shape in made:
                await trial.send([shape])
            if is_full_size:
                rng = random.Random(0)
                for _ in range(requests // 10):
                    await trial.send(rng.sample(made, AT_ONCE))
            bystanders.stop()
            await running
        resumed = fleet.metric("gateway-0", "pagewire_gateway_resumed_total")
        print(
            f"{len(made)} shapes, {len(bystanders.answers)} small requests, "
            f"{len(bystanders.gaps)} chunks, longest gap {trial.longest_gap * 1000:.0f} ms"
        )
        report_loop_lag(fleet)
        assert fleet.supervisor.pids == pids, fleet.log[-40:]
    assert trial.faults + bystanders.faults == []
    assert resumed == 0
