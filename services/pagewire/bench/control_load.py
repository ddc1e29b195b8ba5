"""A constant load on a scheduler over one Multiplex stream, and its measurement."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pagewire.cli.errors import CommandError
from pagewire.rpc.credentials import NO_CREDENTIALS, SCHEDULER_TOKEN, read_token

# Time between the first token of the last request and the measurement.
_SETTLE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that run at once. No request may end during the measurement."""

    running: int
    prompt_tokens: int
    max_tokens: int
    vocab_size: int
    detokenize: bool


@dataclass(frozen=True, slots=True)
class Window:
    """A measurement of steady decoding. `cpu` is the CPU time in seconds by process."""

    seconds: float
    tokens: int
    messages: int
    cpu: dict[str, float]
    # Milliseconds a token of each request: the median, and the slowest request's.
    tpot_ms_median: float
    tpot_ms_max: float
    # Milliseconds between two messages for the same request: the 99th percentile.
    gap_ms_p99: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.seconds


async def measure(
    address: str,
    load: Load,
    seconds: float,
    pids: dict[str, int],
    before: Callable[[], Awaitable[object]] | None = None,
) -> Window:
    """Starts the load, waits until all requests decode, and counts for `seconds`.

    `pids` are the processes whose CPU time is measured, by name. `before` is awaited before the
    measurement, while tokens arrive.
    """
    from pagewire.rpc.checksums import MULTIPLEX, open_stream
    from pagewire.rpc.transport import open_channel

    async with open_channel(address) as channel:
        # The scheduler inherits this environment, so it requires this token.
        credentials = NO_CREDENTIALS.with_token(read_token(None, SCHEDULER_TOKEN))
        call = open_stream(channel, MULTIPLEX, credentials.metadata)
        writer = asyncio.create_task(_submit_all(call, load))
        counter = _Counter(load.running)
        while counter.started < load.running:
            await counter.read(call)
        await writer
        if before is not None:
            waiting = asyncio.ensure_future(before())
            while not waiting.done():
                await counter.read(call)
        settled = time.perf_counter() + _SETTLE_SECONDS
        while time.perf_counter() < settled:
            await counter.read(call)
        window = await _count(call, counter, seconds, pids)
        call.cancel()
        return window


async def _count(call: Any, counter: "_Counter", seconds: float, pids: dict[str, int]) -> Window:
    import numpy as np

    cpu = {name: cpu_seconds(pid) for name, pid in pids.items()}
    counter.reset()
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        await counter.read(call)
    took = time.perf_counter() - began
    used = {name: cpu_seconds(pid) - cpu[name] for name, pid in pids.items()}
    tpot = took * 1e3 / np.maximum(counter.tokens, 1)
    gaps = np.concatenate(counter.gaps) * 1e3
    return Window(
        seconds=took,
        tokens=int(counter.tokens.sum()),
        messages=len(counter.gaps),
        cpu=used,
        tpot_ms_median=float(np.median(tpot)),
        tpot_ms_max=float(tpot.max()),
        gap_ms_p99=float(np.percentile(gaps, 99)),
    )


class _Counter:
    """Counts tokens by request, with few array operations per message to keep the client cheap."""

    def __init__(self, running: int) -> None:
        import numpy as np

        self._np = np
        self._last = np.zeros(running)
        self._seen = np.zeros(running, np.bool_)
        self.tokens = np.zeros(running, np.int64)
        self.gaps: list[Any] = []

    @property
    def started(self) -> int:
        """The number of requests with at least one token."""
        return int(self._seen.sum())

    def reset(self) -> None:
        """Starts a new measurement."""
        self.tokens[:] = 0
        self.gaps.clear()

    async def read(self, call: Any) -> None:
        from pagewire.packing import unpack_unsigned
        from pagewire.rpc.checksums import receive
        from pagewire.v1 import inference_pb2 as pb

        message = await receive(call)
        if not isinstance(message, pb.MultiplexResponse):
            raise CommandError(f"the scheduler ended the stream: {await call.details()}")
        if message.finished:
            finish = message.finished[0].finish
            raise CommandError(
                "a request ended during the measurement: "
                f"{finish.error.message or pb.FinishReason.Name(finish.reason)}"
            )
        if not message.streams:
            return
        now = time.perf_counter()
        streams = unpack_unsigned(message.streams)
        counts = self._np.array(message.token_counts, self._np.int64)
        self.tokens[streams] += counts if len(counts) else 1
        self.gaps.append(now - self._last[streams])
        self._last[streams] = now
        self._seen[streams] = True


async def _submit_all(call: Any, load: Load) -> None:
    import numpy as np

    from pagewire.v1 import inference_pb2 as pb

    generator = np.random.default_rng(0)
    for stream in range(load.running):
        ids = generator.integers(3, load.vocab_size, load.prompt_tokens).tolist()
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=ids),
            stop=pb.StopConditions(max_tokens=load.max_tokens, ignore_eos=True),
            detokenize=load.detokenize,
        )
        submit = pb.Submit(stream=stream, request=request.SerializeToString())
        await call.write(pb.MultiplexRequest(submit=submit))


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU time that a process has used: all threads, user and kernel mode."""
    # The clock id that clock_getcpuclockid(3) returns on Linux. /proc has a resolution of 10 ms.
    return time.clock_gettime(~pid << 3 | 2)
