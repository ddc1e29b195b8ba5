"""A worker tells by measurement whether prompts ride along with decodes for less."""

from collections.abc import Callable

import pytest

from pagewire.worker.measurement.piggyback import TOKENS, measure_ridge
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.limits import Limits

LIMITS = Limits(1000, 64, 16, 100, 4096, 8192)


class TimedBackend:
    """Computes nothing and remembers how many tokens it was last to compute."""

    def submit(self, plan: DevicePlan) -> int:
        self.tokens = plan.num_decodes + plan.num_prefilled
        return self.tokens

    def wait(self, handle: int) -> None:
        assert handle == self.tokens


def ridge(limits: Limits, seconds: Callable[[int], float]) -> int:
    """As measured where a step of so many tokens takes `seconds`."""
    backend = TimedBackend()

    def seconds_of(run: Callable[[], None]) -> float:
        run()
        return seconds(backend.tokens)

    return measure_ridge(backend, limits, seconds_of)  # type: ignore[arg-type]


def test_tokens_ride_along_while_weights_are_read() -> None:
    assert ridge(LIMITS, lambda tokens: max(4e-3, tokens * 2e-5)) == TOKENS


@pytest.mark.parametrize("latency", [0.0, 1e-3])
def test_tokens_that_each_take_their_time_do_not_ride(latency) -> None:
    assert ridge(LIMITS, lambda tokens: latency + tokens * 2e-6) == 0


@pytest.mark.parametrize(
    "limits",
    [
        Limits(1000, 31, 16, 100, 4096, 8192),
        Limits(1000, 64, 16, 100, 128, 8192),
        Limits(1000, 64, 16, 100, 4096, 1024),
    ],
    ids=["slots", "length", "step"],
)
def test_small_workers_do_not_measure(limits) -> None:
    def never(tokens: int) -> float:
        raise AssertionError(f"a step of {tokens} tokens")

    assert ridge(limits, never) == 0
