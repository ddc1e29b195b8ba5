"""A streaming load on an OpenAI-style server from one process, and the times of its requests."""

import asyncio
import gc
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from pagewire.cli.client import authorization

# fmt: off
WORDS = [
    "able", "apple", "autumn", "bread", "bridge", "bright", "castle", "circle", "cloud",
    "copper", "corner", "dance", "desert", "dream", "early", "earth", "evening", "family",
    "farmer", "field", "finger", "flower", "forest", "garden", "gentle", "glass", "golden",
    "green", "happy", "harbor", "heavy", "hidden", "hollow", "honest", "island", "journey",
    "kitchen", "ladder", "letter", "little", "market", "meadow", "mirror", "morning",
    "mountain", "music", "narrow", "ocean", "orange", "paper", "pepper", "planet", "pocket",
    "quiet", "rabbit", "river", "rocket", "school", "season", "shadow", "silver", "simple",
    "singer", "slowly", "smooth", "spring", "square", "stone", "story", "street", "summer",
    "table", "teacher", "thunder", "ticket", "travel", "valley", "velvet", "village", "violin",
    "water", "weather", "whisper", "window", "winter", "wonder", "yellow",
]
# fmt: on


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The requests of one load process. Exactly one of concurrency and request_rate is set."""

    url: str
    model: str
    output_tokens: int
    requests: int = 1
    input_words: int = 1
    concurrency: int | None = 1
    request_rate: float | None = None  # requests a second, Poisson arrivals
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0


@dataclass(slots=True)
class Timing:
    """The times of one request, in seconds. `started` is on the monotonic clock, which is the
    same in all processes of a machine."""

    started: float
    ttft: float = 0.0  # to the first chunk with text
    e2e: float = 0.0  # to the last chunk with text
    itls: list[float] = field(default_factory=list)  # between one chunk with text and the next
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    # For a refusal: its HTTP status, the time to the end of its body, and its Retry-After.
    status: int | None = None
    answered: float = 0.0
    retry_after: str | None = None
    late: float = 0.0  # from its due time until it was sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


def words(rng: random.Random, count: int) -> str:
    """A prompt of random words."""
    return " ".join(rng.choices(WORDS, k=count))


def run_plan(plan: LoadPlan) -> list[Timing]:
    """Sends the plan's requests and returns a timing for each."""
    return asyncio.run(_drive(plan))


async def _drive(plan: LoadPlan) -> list[Timing]:
    import aiohttp

    rng = random.Random(plan.seed)
    bodies = [completion_body(plan, words(rng, plan.input_words)) for _ in range(plan.requests)]
    gc.freeze()  # a collection of all bodies would look like a delay of the server
    url = plan.url.rstrip("/") + "/v1/completions"
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None),
        headers=authorization(),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=1 << 20,
    ) as session:
        if plan.request_rate is not None:
            return await _open_loop(session, url, bodies, plan.request_rate, rng)
        return await _closed_loop(session, url, bodies, plan.concurrency or 1)


async def _closed_loop(
    session: Any, url: str, bodies: list[dict[str, Any]], concurrency: int
) -> list[Timing]:
    """Keeps `concurrency` requests open: when one ends, the next is sent."""
    remaining = iter(bodies)

    async def send_in_turn() -> list[Timing]:
        return [await send(session, url, body) for body in remaining]

    clients = await asyncio.gather(*(send_in_turn() for _ in range(concurrency)))
    return [timing for timings in clients for timing in timings]


async def _open_loop(
    session: Any, url: str, bodies: list[dict[str, Any]], rate: float, rng: random.Random
) -> list[Timing]:
    """Sends requests with Poisson arrivals, without waiting for earlier ones."""
    due = time.perf_counter()
    tasks = []
    for body in bodies:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(session, url, body, due)))
    return await asyncio.gather(*tasks)


async def send(session: Any, url: str, body: dict[str, Any], due: float | None = None) -> Timing:
    """Sends one streaming request and times its chunks."""
    import aiohttp

    now = time.perf_counter()
    timing = Timing(started=now, late=0.0 if due is None else now - due)
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                timing.error = f"HTTP status {response.status}: {(await response.text())[:200]}"
                timing.answered = time.perf_counter() - timing.started
                timing.status = response.status
                timing.retry_after = response.headers.get("retry-after")
                return timing
            await _time_chunks(response.content, timing)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        timing.error = repr(error)
    if timing.error is None and timing.output_tokens == 0:
        timing.error = "the stream ended without usage"
    return timing


async def _time_chunks(lines: Any, timing: Timing) -> None:
    last = None
    async for line in lines:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter() - timing.started
        event = json.loads(line[6:])
        if "error" in event:
            timing.error = str(event["error"])
            return
        if event.get("usage"):
            timing.prompt_tokens = event["usage"]["prompt_tokens"]
            timing.output_tokens = event["usage"]["completion_tokens"]
        if event.get("choices") and event["choices"][0].get("text"):
            if last is None:
                timing.ttft = now
            else:
                timing.itls.append(now - last)
            last = timing.e2e = now


def completion_body(plan: LoadPlan, prompt: str) -> dict[str, Any]:
    """The JSON body of one request of a plan."""
    return {
        "model": plan.model,
        "prompt": prompt,
        "max_tokens": plan.output_tokens,
        "temperature": plan.temperature,
        "ignore_eos": plan.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
