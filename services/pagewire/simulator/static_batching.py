"""Static batching, a baseline for continuous batching: requests start and end in one batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagewire.simulator.step_time import StepTime, Work
from pagewire.simulator.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class StaticRun:
    """The output of one worker for all requests, and the seconds that it took."""

    output_tokens: int
    seconds: float

    @property
    def output_tokens_per_second(self) -> float:
        """The throughput."""
        return self.output_tokens / self.seconds


def run_static(
    requests: Sequence[TraceRequest],
    batch_size: int,
    max_num_batched_tokens: int,
    step_time: StepTime,
    padded: bool,
) -> StaticRun:
    """Runs all requests on one worker, in order, one batch after another.

    A batch decodes until its longest output is complete. If `padded`, complete rows are computed
    until then, as in a batch of fixed shape; otherwise they cost nothing.
    """
    seconds = 0.0
    for at in range(0, len(requests), batch_size):
        batch = requests[at : at + batch_size]
        inputs = np.array([request.input_length for request in batch], np.int64)
        outputs = np.array([request.output_length for request in batch], np.int64)
        # The prefill returns the first token; each other token needs a step.
        decodes = np.full_like(outputs, outputs.max() - 1) if padded else outputs - 1
        prefill_steps = -(-int(inputs.sum()) // max_num_batched_tokens)
        work = Work(
            steps=prefill_steps + int(outputs.max()) - 1,
            rows=int(decodes.sum()),
            kv_tokens=int((decodes * inputs + decodes * (decodes + 1) // 2).sum()),
            prefill_tokens=int(inputs.sum()),
            prefill_pairs=int((inputs * (inputs + 1) // 2).sum()),
        )
        seconds += step_time.seconds(work)
    return StaticRun(sum(request.output_length for request in requests), seconds)
