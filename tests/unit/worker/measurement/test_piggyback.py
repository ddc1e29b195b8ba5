"""A worker measures whether piggybacked prefill saves time."""

from collections.abc import Callable

import pytest

from pagewire.worker.measurement.piggyback import PIGGYBACK_TOKENS, measure_piggyback
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.limits import Limits

LIMITS = Limits(1000, 64, 16, 100, 4096, 8192)


class TimedBackend:
    """Computes nothing; stores the number of tokens of the last step."""

    def submit(self, plan: DevicePlan) -> int:
        self.tokens = plan.num_decodes + plan.num_prefilled
        return self.tokens

    def wait(self, handle: int) -> None:
        assert handle == self.tokens


def measured(limits: Limits, seconds: Callable[[int], float]) -> int:
    """The result if a step of n tokens lasts `seconds(n)`."""
    backend = TimedBackend()

    def measure(run: Callable[[], None]) -> float:
        run()
        return seconds(backend.tokens)

    return measure_piggyback(backend, limits, measure)  # type: ignore[arg-type]


def test_prompt_tokens_are_piggybacked_where_reading_the_weights_takes_the_time() -> None:
    assert measured(LIMITS, lambda tokens: max(4e-3, tokens * 2e-5)) == PIGGYBACK_TOKENS


@pytest.mark.parametrize("latency", [0.0, 1e-3])
def test_nothing_is_piggybacked_where_each_token_takes_its_own_time(latency) -> None:
    assert measured(LIMITS, lambda tokens: latency + tokens * 2e-6) == 0


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

    assert measured(limits, never) == 0
