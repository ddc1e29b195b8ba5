"""The line about a scheduler's throughput, every ten seconds while it has something to do."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pagewire.lifecycle.logs import fields
from pagewire.scheduler import metrics
from pagewire.scheduler.reports.vllm_names import kv_use
from pagewire.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens since the start of the process."""

    prompt: int
    cached: int
    output: int

    @classmethod
    def read(cls) -> "Totals":
        """The totals of this process's metrics."""
        return cls(
            metrics.total(metrics.PROMPT_TOKENS),
            metrics.total(metrics.CACHED_TOKENS),
            metrics.total(metrics.OUTPUT_TOKENS),
        )


class Throughput:
    """Compares totals with those of the last call."""

    def __init__(self, totals: Totals, now: float) -> None:
        self._totals = totals
        self._measured_at = now

    def measure(self, totals: Totals, load: pb.Load, now: float) -> dict[str, float] | None:
        """The work since the last call; None if there was none, and nothing runs or waits."""
        before, seconds = self._totals, now - self._measured_at
        self._totals, self._measured_at = totals, now
        if totals == before and not load.running and not load.waiting:
            return None
        prompt = totals.prompt - before.prompt
        return {
            "prompt_tokens_per_second": prompt / seconds,
            "output_tokens_per_second": (totals.output - before.output) / seconds,
            "running": load.running,
            "waiting": load.waiting,
            "kv_use": kv_use(load),
            "prefix_cache_hits": (totals.cached - before.cached) / max(1, prompt),
        }


async def log_throughput(load: Callable[[], pb.Load]) -> None:
    """Writes the line until it is cancelled."""
    loop = asyncio.get_running_loop()
    throughput = Throughput(Totals.read(), loop.time())
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        found = throughput.measure(Totals.read(), load(), loop.time())
        if found is not None:
            rounded = {name: round(value, 3) for name, value in found.items()}
            log.info("%s", line(found), extra=fields(**rounded))


def line(found: dict[str, float]) -> str:
    """The line in words."""
    return (
        f"{found['prompt_tokens_per_second']:.1f} prompt tokens/s, "
        f"{found['output_tokens_per_second']:.1f} output tokens/s, "
        f"{found['running']:.0f} running, {found['waiting']:.0f} waiting, "
        f"KV {100 * found['kv_use']:.1f} % used, "
        f"{100 * found['prefix_cache_hits']:.1f} % of prompt tokens from the cache"
    )
