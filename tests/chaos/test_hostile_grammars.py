"""Grammars with long compilations delay no other client's stream, and no event loop."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from pagewire.models import EMBEDDED_NAME
from pagewire.worker.protocol.constraints.slot_masks import MAX_WAIT
from support.hostile_grammars import HOSTILE, TAKES_LONG
from support.loop_lags import LoopLags
from support.processes.fleet import running_fleet
from support.processes.real_model import WORKER

pytestmark = pytest.mark.chaos

MAX_BLOCKED = 0.05
ATTEMPTS = 3  # a busy machine delays others too
FIELDS = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}


@dataclass
class Stream:
    """A stream without a constraint, and its waits between chunks."""

    gaps: list[float] = field(default_factory=list)

    async def run(self, session: aiohttp.ClientSession, url: str) -> None:
        body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        async with session.post(url, json={"model": EMBEDDED_NAME, **body}) as answer:
            assert answer.status == 200
            last = time.monotonic()
            async for _ in answer.content:
                now = time.monotonic()
                self.gaps.append(now - last)
                last = now


async def send_all(session: aiohttp.ClientSession, url: str) -> list[int]:
    """The statuses of the answers to all hostile grammars, sent at once."""

    async def send(output: dict[str, Any]) -> int:
        ((kind, value),) = output.items()
        body = {"prompt": "x", "max_tokens": 25, FIELDS[kind]: value}
        async with session.post(url, json={"model": EMBEDDED_NAME, **body}) as answer:
            assert answer.status in (200, 400, 500), await answer.text()
            return answer.status

    return await asyncio.gather(*map(send, [*HOSTILE.values(), TAKES_LONG]))


async def test_hostile_grammars_delay_nobody() -> None:
    async with running_fleet(workers=1, worker_command=WORKER) as fleet:
        url = f"{fleet.urls[0]}/v1/completions"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            schema = {"guided_json": {"type": "integer"}, "prompt": "x", "max_tokens": 1}
            async with session.post(url, json={"model": EMBEDDED_NAME, **schema}) as answer:
                assert answer.status == 200  # the helpers have started
            faults = []
            for _ in range(ATTEMPTS):
                faults = await _faults(fleet, session, url)
                if not faults:
                    break
            assert not faults


async def _faults(fleet: Any, session: aiohttp.ClientSession, url: str) -> list[str]:
    """The faults while hostile grammars arrive beside a stream."""
    stream = Stream()
    running = asyncio.create_task(stream.run(session, url))
    await asyncio.sleep(3)
    quiet, lags = max(stream.gaps), await LoopLags.read(fleet)
    pids, before = dict(fleet.supervisor.pids), len(stream.gaps)
    statuses = await send_all(session, url)
    longest = max(stream.gaps[before:], default=0.0)
    blocked = (await LoopLags.read(fleet)).at_least(lags, "loop")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    print(json.dumps({"quiet": quiet, "longest": longest, "blocked": blocked}), statuses)
    assert statuses[-1] == 400
    assert fleet.supervisor.pids == pids, "a process was lost"
    faults = [f"{name} was blocked for {s:.3f} s" for name, s in blocked.items() if s > MAX_BLOCKED]
    if longest > 3 * quiet + 3 * MAX_WAIT:
        faults.append(f"a chunk came after {longest:.2f} s; without the grammars after {quiet:.2f}")
    return faults
