"""How long a call takes on the worker's device."""

from collections.abc import Callable
from statistics import median

from pagewire.worker.protocol.backend import Backend
from pagewire.worker.protocol.steps.device_plan import DevicePlan

REPEATS = 3

# Calls a function and returns the seconds that its work takes on the device.
MeasureSeconds = Callable[[Callable[[], None]], float]


def median_seconds(measure: MeasureSeconds, run: Callable[[], None]) -> float:
    """Median seconds of `run` after one call to warm up; at least 1 ns, so never 0."""
    run()
    return max(1e-9, median(measure(run) for _ in range(REPEATS)))


def step_runner(backend: Backend, plan: DevicePlan) -> Callable[[], None]:
    """A function that computes the step `plan` and waits for it."""

    def run() -> None:
        backend.wait(backend.submit(plan))

    return run
