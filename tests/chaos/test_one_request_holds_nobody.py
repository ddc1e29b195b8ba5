"""Whatever one client sends, the streams of others go on: no event loop is held for 50 ms.

`pytest -s` prints a line a request. At full size (`make chaos`) every request is sent with and
without API keys, and then several of them at once.
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
from support.clients.bystanders import Bystanders, Wait, percentile
from support.clients.hostile_client import HostileClient, hostile_client
from support.clients.hostile_shapes import Outcome, Shape, Target, shapes
from support.processes.fleet import SIMULATED, Fleet, running_fleet
from support.processes.loop_lags import LoopLags
from support.processes.trial import report_loop_lag

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

QUIET_SECONDS = 4.0
SETTLE_SECONDS = 0.05  # in which a late effect of a request still counts as its own
LONGEST_HOLD = 0.05
LONGER_PAUSE = 0.1  # than the longest of a quiet time
# A request that holds others up does so each time. A host that takes a virtual CPU away does it at
# random, and no process can tell that from a long call.
ATTEMPTS = 3
STRAY = 1 / 20  # most requests that may hold others up once
AT_ONCE = 4
MAX_MEMORY = 256 << 20  # that a service may take more than before
WORKER = (*(flag for flag in SIMULATED if "speedup" not in flag), "--speedup=0.1")
# Longer chunks of prompts would hold up the streams by themselves.
SCHEDULER = ("--max-num-batched-tokens=256", "--max-waiting-seconds=60")


@dataclass(frozen=True)
class Quiet:
    """The longest that bystanders may have to wait, by what they noticed when they were alone."""

    gap: float
    answer: float

    @classmethod
    def of(cls, bystanders: Bystanders) -> "Quiet":
        """By what bystanders have noticed so far."""
        return cls(_most(bystanders.gaps), _most(bystanders.answers))


def _most(quiet: list[Wait]) -> float:
    longest = max(wait.seconds for wait in quiet)
    return max(longest + LONGER_PAUSE, 3 * percentile(quiet, 0.99))


@dataclass(frozen=True)
class Span:
    """What bystanders noticed in a span of time; `stalled` is how long the machine stood."""

    bystanders: Bystanders
    began: float
    ended: float
    stalled: float

    def longest(self, waits: list[Wait]) -> float:
        """The longest wait."""
        return max((wait.seconds for wait in self._within(waits)), default=0.0)

    def too_long(self, waits: list[Wait], most: float) -> bool:
        """Whether a wait was longer than `most`, stalls of the machine aside."""
        return any(
            wait.seconds > most + self.stalled + self.bystanders.stall(wait.began, wait.ended)
            for wait in self._within(waits)
        )

    def _within(self, waits: list[Wait]) -> list[Wait]:
        found = []
        for wait in reversed(waits):  # in the order of their ends
            if wait.ended < self.began:
                break
            if wait.began <= self.ended:
                found.append(wait)
        return found


@dataclass
class Trial:
    """Sends requests beside bystanders; `faults` is what was wrong."""

    fleet: Fleet
    bystanders: Bystanders
    client: HostileClient
    quiet: Quiet
    lags: LoopLags
    faults: list[str] = field(default_factory=list)
    longest_gap: float = 0.0
    sent: int = 0
    stray: list[str] = field(default_factory=list)

    async def send(self, sent: list[Shape]) -> None:
        """Sends requests side by side; again while they hold others up."""
        self.sent += 1
        tries = []
        for _ in range(ATTEMPTS):
            tries.append(await self._try(sent))
            if not tries[-1]:
                self.stray += [held for each in tries for held in each]
                return
        self.faults += tries[-1]

    def check(self) -> None:
        """Fails with what was wrong."""
        faults = [*self.faults, *self.bystanders.faults]
        assert not faults, "\n".join(faults)
        assert len(self.stray) <= STRAY * self.sent, "\n".join(self.stray)

    async def _try(self, sent: list[Shape]) -> list[str]:
        """Who was held up. What else was wrong is noted."""
        names = " + ".join(shape.name for shape in sent)
        began, pids = time.monotonic(), dict(self.fleet.supervisor.pids)
        outcomes = await asyncio.gather(*(self.client.send(shape.name) for shape in sent))
        await asyncio.sleep(SETTLE_SECONDS)
        ended = time.monotonic()
        if self.fleet.supervisor.pids != pids:
            self.faults.append(f"{names}: a process was lost")
            print(self.faults[-1])
            self.lags = await self._lags_when_back(pids)
            return []
        before, self.lags = self.lags, await LoopLags.read(self.fleet)
        # A chunk comes through all processes.
        stalled = sum(self.lags.at_most(before, "machine").values())
        span = Span(self.bystanders, began, ended, stalled)
        held = self.lags.at_least(before, "loop")
        all_held = min(held.values())  # a machine without a CPU for any of them
        faults = [
            f"{shape.name}: {fault}"
            for shape, outcome in zip(sent, outcomes, strict=True)
            if (fault := shape.fault(outcome)) is not None
        ]
        held_up = [
            f"{names}: {process} was held for {seconds * 1000:.0f} ms"
            for process, seconds in held.items()
            if seconds - all_held >= LONGEST_HOLD
        ]
        held_up += self._paused(sent, names, span)
        self._print(names, outcomes, span, self.lags.at_most(before, "loop"))
        for fault in [*faults, *held_up]:
            print(f"    {fault:.400}")
        self.faults += faults
        return held_up

    def _paused(self, sent: list[Shape], names: str, span: Span) -> list[str]:
        gaps, answers = self.bystanders.gaps, self.bystanders.answers
        self.longest_gap = max(self.longest_gap, span.longest(gaps))
        paused = []
        if span.too_long(gaps, self.quiet.gap):
            paused.append(f"{names}: a stream stood for {span.longest(gaps) * 1000:.0f} ms")
        # Several at once, or a batch in front in the queue, take the CPU or the workers' turn.
        alone = len(sent) == 1 and not sent[0].works
        if alone and span.too_long(answers, self.quiet.answer):
            paused.append(f"{names}: an answer took {span.longest(answers) * 1000:.0f} ms")
        return paused

    def _print(
        self, names: str, outcomes: list[Outcome], span: Span, loops: dict[str, float]
    ) -> None:
        status = "/".join(str(outcome.status) for outcome in outcomes)
        held = " ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in loops.items())
        print(
            f"{names:34} {status:>4} {span.ended - span.began:6.2f} s; ms: "
            f"gap {span.longest(self.bystanders.gaps) * 1000:.0f}, "
            f"answer {span.longest(self.bystanders.answers) * 1000:.0f}, "
            f"machine {span.stalled * 1000:.0f}, loops {held}"
        )

    async def _lags_when_back(self, pids: dict[str, int]) -> LoopLags:
        """The loop lags once the fleet has as many processes as it had."""
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError, KeyError):  # it is starting
                    if len(self.fleet.supervisor.pids) == len(pids):
                        return await LoopLags.read(self.fleet)
                await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def fleet_with(keys: list[str], folder: Path) -> AsyncIterator[Fleet]:
    """A fleet that asks for these keys, if there are some."""
    flags: tuple[str, ...] = ()
    if keys:
        lines = [entry_of(f"key-{n}", key, None, RateLimits()) for n, key in enumerate(keys)]
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
        yield fleet


@pytest.mark.parametrize("keyed", [False, True], ids=["without keys", "with keys"])
async def test_one_request_holds_nobody(
    tmp_path: Path, requests: int, is_full_size: bool, keyed: bool
) -> None:
    keys = [new_key(), new_key()] if keyed else []
    mine, its = keys or (None, None)
    made = shapes(is_full_size)
    if keyed and not is_full_size:
        made = made[::3]
    assert len(made) >= 25
    async with fleet_with(keys, tmp_path) as fleet:
        pids = dict(fleet.supervisor.pids)
        url = urlsplit(fleet.urls[0])
        assert url.hostname is not None
        assert url.port is not None
        target = Target(url.hostname, url.port, fleet.schedulers[0], its)
        async with hostile_client(target, is_full_size) as client:
            bystanders = Bystanders(fleet.urls[0], mine)
            running = asyncio.create_task(bystanders.run())
            await asyncio.sleep(1.0)  # in which the streams start
            bystanders.gaps.clear()
            bystanders.answers.clear()
            await asyncio.sleep(QUIET_SECONDS)
            quiet = Quiet.of(bystanders)
            print(
                f"\nquiet: streams may stand for {quiet.gap * 1000:.0f} ms, answers may take "
                f"{quiet.answer * 1000:.0f} ms"
            )
            memory = {name: fleet.peak_memory(pid) for name, pid in pids.items()}
            trial = Trial(fleet, bystanders, client, quiet, await LoopLags.read(fleet))
            for shape in made:
                await trial.send([shape])
            if is_full_size:
                rng = random.Random(0)
                for _ in range(requests // 10):
                    await trial.send(rng.sample(made, AT_ONCE))
            bystanders.stop()
            await running
        assert fleet.supervisor.pids == pids, "\n".join([*trial.faults, *fleet.log[-40:]])
        grown = {name: fleet.peak_memory(pid) - memory[name] for name, pid in pids.items()}
        print(
            f"{len(made)} requests beside {len(bystanders.answers)} small ones and "
            f"{len(bystanders.gaps)} chunks; longest gap {trial.longest_gap * 1000:.0f} ms; memory "
            + ", ".join(f"{name} +{size / (1 << 20):.0f} MB" for name, size in grown.items())
        )
        report_loop_lag(fleet)
        resumed = fleet.metric("gateway-0", "pagewire_gateway_resumed_total")
    trial.check()
    assert max(grown.values()) < MAX_MEMORY
    assert resumed == 0
