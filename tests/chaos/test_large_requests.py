"""Large and costly requests do not delay other clients: no event loop is blocked for 50 ms.

`pytest -s` prints a line for each request. In a small run one half of the requests is sent with API
keys, the other without. At full size (`make chaos`) every request is sent both ways, and then
several of them at once.
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
from support.clients.background_load import BackgroundLoad, Wait, percentile
from support.clients.costly_request_sender import CostlyRequestSender, costly_request_sender
from support.clients.costly_requests import CostlyRequest, Outcome, Target, costly_requests
from support.loop_lags import LoopLags
from support.processes.fleet import SIMULATED, Fleet, running_fleet
from support.processes.fleet_checks import report_loop_lag

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

QUIET_SECONDS = 4.0
SETTLE_SECONDS = 0.05  # effects up to this late still count
DRAIN_SECONDS = 10.0  # for the queue of the scheduler after a request that fills it
DRAINED = 3  # so many answers in the usual time show that the queue is drained
MAX_BLOCKED = 0.05
LONGER_PAUSE = 0.1  # more than the longest wait of the quiet time
# A costly request delays others each time. A host takes virtual CPUs away at random; a process
# cannot distinguish that from a long call.
ATTEMPTS = 3
MAX_STRAY = 1 / 20  # share of all requests that may delay others once
AT_ONCE = 4
MAX_MEMORY = 256 << 20  # growth of a service
WORKER = (*(flag for flag in SIMULATED if "speedup" not in flag), "--speedup=0.1")
# Larger prefill chunks would delay the streams too.
SCHEDULER = ("--max-num-batched-tokens=256", "--max-waiting-seconds=60")


@dataclass(frozen=True)
class Quiet:
    """The longest allowed waits, derived from the waits of a quiet time."""

    gap: float
    answer: float

    @classmethod
    def of(cls, background: BackgroundLoad) -> "Quiet":
        """Returns limits from the waits so far."""
        return cls(_allowed(background.gaps), _allowed(background.answers))


def _allowed(quiet: list[Wait]) -> float:
    longest = max(wait.seconds for wait in quiet)
    return max(longest + LONGER_PAUSE, 3 * percentile(quiet, 0.99))


@dataclass(frozen=True)
class Span:
    """The waits in a span of time; `stalled`: seconds for which the machine was stalled."""

    background: BackgroundLoad
    began: float
    ended: float
    stalled: float

    def longest(self, waits: list[Wait]) -> float:
        """The longest wait in the span, in seconds."""
        return max((wait.seconds for wait in self._within(waits)), default=0.0)

    def too_long(self, waits: list[Wait], allowed: float) -> bool:
        """Whether a wait was longer than allowed, not counting stalls of the machine."""
        return any(
            wait.seconds > allowed + self.stalled + self.background.stall(wait.began, wait.ended)
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
class Experiment:
    """Sends requests beside the background load; `faults` lists the errors."""

    fleet: Fleet
    background: BackgroundLoad
    sender: CostlyRequestSender
    quiet: Quiet
    lags: LoopLags
    faults: list[str] = field(default_factory=list)
    drained: float = 0.0  # answers to requests from before this time are not judged
    longest_gap: float = 0.0
    sent: int = 0
    stray: list[str] = field(default_factory=list)

    async def send(self, sent: list[CostlyRequest]) -> None:
        """Sends requests concurrently; repeats them if they delay others."""
        self.sent += 1
        tries = []
        for _ in range(ATTEMPTS):
            tries.append(await self._try(sent))
            if any(request.works for request in sent):
                await self._drain()
            if not tries[-1]:
                self.stray += [delay for each in tries for delay in each]
                return
        self.faults += tries[-1]

    def check(self) -> None:
        """AssertionError if there are faults."""
        faults = [*self.faults, *self.background.faults]
        assert not faults, "\n".join(faults)
        assert len(self.stray) <= MAX_STRAY * self.sent, "\n".join(self.stray)

    async def _try(self, sent: list[CostlyRequest]) -> list[str]:
        """Sends requests once; returns the delays of others. Other faults go to `faults`."""
        names = " + ".join(request.name for request in sent)
        began, pids = time.monotonic(), dict(self.fleet.supervisor.pids)
        outcomes = await asyncio.gather(*(self.sender.send(request.name) for request in sent))
        await asyncio.sleep(SETTLE_SECONDS)
        ended = time.monotonic()
        if self.fleet.supervisor.pids != pids:
            self.faults.append(f"{names}: a process was lost")
            print(self.faults[-1])
            self.lags = await self._lags_when_back(pids)
            return []
        before, self.lags = self.lags, await LoopLags.read(self.fleet)
        # A chunk passes through all processes.
        stalled = sum(self.lags.at_most(before, "machine").values())
        span = Span(self.background, began, ended, stalled)
        blocked = self.lags.at_least(before, "loop")
        all_blocked = min(blocked.values())  # the machine had no CPU for any of them
        faults = [
            f"{request.name}: {fault}"
            for request, outcome in zip(sent, outcomes, strict=True)
            if (fault := request.fault(outcome)) is not None
        ]
        delays = [
            f"{names}: the loop of {process} was blocked for {seconds * 1000:.0f} ms"
            for process, seconds in blocked.items()
            if seconds - all_blocked >= MAX_BLOCKED
        ]
        delays += self._paused(sent, names, span)
        self._print(names, outcomes, span, self.lags.at_most(before, "loop"))
        for fault in [*faults, *delays]:
            print(f"    {fault:.400}")
        self.faults += faults
        return delays

    @property
    def _answers(self) -> list[Wait]:
        return [wait for wait in self.background.answers if wait.began >= self.drained]

    async def _drain(self) -> None:
        """Waits until small requests have their answers in the usual time again.

        Small requests behind the one just sent would count against the next one.
        """
        ended = time.monotonic()
        while True:
            begun = [wait for wait in self.background.answers if wait.began > ended][-DRAINED:]
            usual = [wait for wait in begun if wait.seconds <= self.quiet.answer]
            if len(usual) == DRAINED:
                self.drained = usual[0].began
                return
            if time.monotonic() > ended + DRAIN_SECONDS:
                self.faults.append(f"answers are slow for {DRAIN_SECONDS:.0f} s")
                return
            await asyncio.sleep(0.01)

    def _paused(self, sent: list[CostlyRequest], names: str, span: Span) -> list[str]:
        gaps, answers = self.background.gaps, self._answers
        self.longest_gap = max(self.longest_gap, span.longest(gaps))
        paused = []
        if span.too_long(gaps, self.quiet.gap):
            paused.append(f"{names}: a stream paused for {span.longest(gaps) * 1000:.0f} ms")
        # Several requests at once, or a batch before them in the queue, delay answers by design.
        alone = len(sent) == 1 and not sent[0].works
        if alone and span.too_long(answers, self.quiet.answer):
            paused.append(f"{names}: an answer took {span.longest(answers) * 1000:.0f} ms")
        return paused

    def _print(
        self, names: str, outcomes: list[Outcome], span: Span, loops: dict[str, float]
    ) -> None:
        status = "/".join(str(outcome.status) for outcome in outcomes)
        lags = " ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in loops.items())
        print(
            f"{names:34} {status:>4} {span.ended - span.began:6.2f} s; ms: "
            f"gap {span.longest(self.background.gaps) * 1000:.0f}, "
            f"answer {span.longest(self._answers) * 1000:.0f}, "
            f"machine {span.stalled * 1000:.0f}, loops {lags}"
        )

    async def _lags_when_back(self, pids: dict[str, int]) -> LoopLags:
        """The loop lags, once the fleet has its processes again."""
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError, KeyError):  # it is starting
                    if len(self.fleet.supervisor.pids) == len(pids):
                        return await LoopLags.read(self.fleet)
                await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def fleet_with(keys: list[str], folder: Path) -> AsyncIterator[Fleet]:
    """A fleet that accepts these keys, or all requests if there are none."""
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
async def test_large_requests_do_not_delay_others(
    tmp_path: Path, requests: int, is_full_size: bool, keyed: bool
) -> None:
    keys = [new_key(), new_key()] if keyed else []
    mine, its = keys or (None, None)
    to_send = costly_requests(is_full_size)
    if not is_full_size:
        to_send = to_send[keyed::2]  # each with keys or without
    assert len(to_send) >= 25
    async with fleet_with(keys, tmp_path) as fleet:
        pids = dict(fleet.supervisor.pids)
        url = urlsplit(fleet.urls[0])
        assert url.hostname is not None
        assert url.port is not None
        target = Target(url.hostname, url.port, fleet.schedulers[0], its)
        async with costly_request_sender(target, is_full_size) as sender:
            background = BackgroundLoad(fleet.urls[0], mine)
            running = asyncio.create_task(background.run())
            await asyncio.sleep(1.0)  # the streams start
            background.gaps.clear()
            background.answers.clear()
            await asyncio.sleep(QUIET_SECONDS)
            quiet = Quiet.of(background)
            print(
                f"\nquiet: streams may pause for {quiet.gap * 1000:.0f} ms, answers may take "
                f"{quiet.answer * 1000:.0f} ms"
            )
            memory = {name: fleet.peak_memory(pid) for name, pid in pids.items()}
            experiment = Experiment(fleet, background, sender, quiet, await LoopLags.read(fleet))
            for request in to_send:
                await experiment.send([request])
            if is_full_size:
                rng = random.Random(0)
                for _ in range(requests // 10):
                    await experiment.send(rng.sample(to_send, AT_ONCE))
            background.stop()
            await running
        assert fleet.supervisor.pids == pids, "\n".join([*experiment.faults, *fleet.log[-40:]])
        grown = {name: fleet.peak_memory(pid) - memory[name] for name, pid in pids.items()}
        print(
            f"{len(to_send)} requests beside {len(background.answers)} small ones and "
            f"{len(background.gaps)} chunks; longest gap "
            f"{experiment.longest_gap * 1000:.0f} ms; memory "
            + ", ".join(f"{name} +{size / (1 << 20):.0f} MB" for name, size in grown.items())
        )
        report_loop_lag(fleet)
        resumed = fleet.metric("gateway-0", "pagewire_gateway_resumed_total.*")
    experiment.check()
    assert max(grown.values()) < MAX_MEMORY
    assert resumed == 0
