"""Streams and short requests that run beside other requests, and how long they wait."""

import asyncio
import json
import random
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import aiohttp

STREAM_TOKENS = 1500
SMALL_TOKENS = 2
_TICK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for a chunk of a stream or for an answer; times of the monotonic clock."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """The length of the wait."""
        return self.ended - self.began


@dataclass
class BackgroundLoad:
    """Runs `streams` streams at all times and sends `rate` short requests a second."""

    url: str
    key: str | None
    streams: int = 8
    rate: float = 20.0
    gaps: list[Wait] = field(default_factory=list)  # between two chunks of a stream
    answers: list[Wait] = field(default_factory=list)  # to short requests
    stalls: list[Wait] = field(default_factory=list)  # late timers of this process
    faults: list[str] = field(default_factory=list)
    tokens: int = 0
    _texts: dict[int, str] = field(default_factory=dict)
    _stopped: bool = False

    async def run(self) -> None:
        """Runs until `stop`, which leaves streams unfinished."""
        connector = aiohttp.TCPConnector(limit=0)
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        timeout = aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(
                self.url, connector=connector, headers=headers, timeout=timeout
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._record_stalls())
            for number in range(self.streams):
                group.create_task(self._stream(session, number))
            while not self._stopped:
                group.create_task(self._ask(session))
                await asyncio.sleep(1 / self.rate)

    def stop(self) -> None:
        """Ends `run`."""
        self._stopped = True

    def stall(self, began: float, ended: float) -> float:
        """The longest stall of this process within a span of time, in seconds."""
        first = bisect_left(self.stalls, began, key=lambda stall: stall.ended)
        longest = 0.0
        for stall in self.stalls[first:]:
            if stall.began > ended:
                break
            longest = max(longest, stall.seconds)
        return longest

    async def _record_stalls(self) -> None:
        while not self._stopped:
            due = time.monotonic() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            self.stalls.append(Wait(due, max(due, time.monotonic())))

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(number)
        body = {
            "prompt": [rng.randrange(256, 1000) for _ in range(24)],
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": number,
            "stream": True,
        }
        while not self._stopped:
            try:
                async with session.post("/v1/completions", json=body) as response:
                    if response.status != 200:
                        self.faults.append(
                            f"stream {number}: {response.status} {await response.text()}"
                        )
                        await asyncio.sleep(0.1)
                        continue
                    self._check(number, *await self._read(response))
            except aiohttp.ClientError as error:
                self.faults.append(f"stream {number}: {error!r}")
                await asyncio.sleep(0.1)

    async def _read(self, response: aiohttp.ClientResponse) -> tuple[list[bytes], bool]:
        """The events of a stream, and whether it was complete."""
        events: list[bytes] = []
        last = None
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            if last is not None:
                self.gaps.append(Wait(last, now))
            last = now
            if line.startswith(b"data: [DONE]"):
                return events, True
            events.append(line)
            if self._stopped:
                return events, False
        return events, False

    def _check(self, number: int, events: list[bytes], ended: bool) -> None:
        """Checks that a stream is complete and has the same text as the time before."""
        text = ""
        for event in events:
            message: dict[str, Any] = json.loads(event[6:])
            if "error" in message:
                self.faults.append(f"stream {number} failed: {message['error']}")
                return
            text += "".join(choice["text"] for choice in message["choices"])
        self.tokens += len(events)
        known = self._texts.setdefault(number, text)
        shorter, longer = sorted((known, text), key=len)
        if not longer.startswith(shorter):
            self.faults.append(f"stream {number} has another text than before")
        if not ended and not self._stopped:
            self.faults.append(f"stream {number} broke off")
        self._texts[number] = longer

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": SMALL_TOKENS}
        began = time.monotonic()
        try:
            async with session.post("/v1/chat/completions", json=body) as response:
                await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            self.faults.append(f"a small request: {error!r}")
            return
        ended = time.monotonic()
        if status == 200:
            self.answers.append(Wait(began, ended))
        else:
            self.faults.append(f"a small request at {began:.2f}: status {status}")


def percentile(waits: list[Wait], fraction: float) -> float:
    """A percentile of the waits, in seconds."""
    found = sorted(wait.seconds for wait in waits)
    return found[min(len(found) - 1, int(fraction * len(found)))]
