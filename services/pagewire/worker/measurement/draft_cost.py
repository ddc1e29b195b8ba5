"""Measures the cost of one draft of a draft model, which determines the number of drafts."""

from collections.abc import Callable
from dataclasses import replace

from pagewire.worker.measurement.timing import MeasureSeconds, step_runner
from pagewire.worker.protocol.backend import Backend
from pagewire.worker.protocol.steps.device_plan import dummy_plan
from pagewire.worker.protocol.steps.limits import Limits

# The fastest round counts, because other processes only add time.
ROUNDS = 9


def measure_draft_cost(
    target: Backend, make_draft: Callable[[], None], limits: Limits, measure: MeasureSeconds
) -> float:
    """The time of `make_draft` (one token), divided by the time of the target's step of one row."""
    # Without filters, because sampling with them may take as long as a small model.
    plan = replace(dummy_plan(limits, decodes=1, chunks=0, chunk_length=0), filtered=False)
    runs = (step_runner(target, plan), make_draft)
    for run in runs:
        run()  # to warm up
    times = [[measure(run) for run in runs] for _ in range(ROUNDS)]
    of_target, of_draft = map(min, zip(*times, strict=True))
    return float(of_draft / max(of_target, 1e-9))
