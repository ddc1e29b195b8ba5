"""Settings of simulated workers."""

from dataclasses import dataclass
from typing import Literal

from pagewire.config.fields import setting
from pagewire.config.shared import WorkerLimitsConfig


@dataclass(frozen=True, kw_only=True)
class SimulatedWorkerConfig(WorkerLimitsConfig):
    """Settings of workers without a model: they return deterministic tokens after the time that a
    device would need."""

    count: int = setting(
        1,
        "Workers in this process. With more than one, they listen on the port of worker_address "
        "and those that follow, or on PATH.0, PATH.1 and so on.",
        minimum=1,
        maximum=10_000,
    )
    profile: Literal["h200-llama-3.1-8b", "h200-qwen3-0.6b"] = setting(
        "h200-llama-3.1-8b",
        "Device and model whose step times, copy speed and KV memory are simulated.",
    )
    speedup: float = setting(
        1.0,
        "How many times faster than the device's the simulated steps are; 0 makes them take no "
        "time.",
        minimum=0,
    )
