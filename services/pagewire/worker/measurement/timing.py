"""How long something takes on the worker's device."""

from collections.abc import Callable
from statistics import median

from pagewire.worker.protocol.backend import Backend
from pagewire.worker.protocol.steps.device_plan import DevicePlan

REPEATS = 3

# Calls a function and says how long what that did takes on the device.
SecondsOf = Callable[[Callable[[], None]], float]


def median_seconds(seconds_of: SecondsOf, run: Callable[[], None]) -> float:
    """What `run` takes when it is not the first time; above 0, however fast the clock thinks."""
    run()
    return max(1e-9, median(seconds_of(run) for _ in range(REPEATS)))


def computing(backend: Backend, plan: DevicePlan) -> Callable[[], None]:
    """What computes a step, to be timed."""

    def run() -> None:
        backend.wait(backend.submit(plan))

    return run
