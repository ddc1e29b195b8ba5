"""Measures whether piggybacked prefill saves time on this device.

A step of few tokens is bound by reading the weights, a step of many tokens by computing. Between
the two, where the roofline bends, prompt tokens beside decodes cost little: the weights are read
for the decodes anyway. In a small model the latency of the kernels outweighs this gain.
"""

import logging

from pagewire.worker.measurement.timing import MeasureSeconds, median_seconds, step_runner
from pagewire.worker.protocol.backend import Backend
from pagewire.worker.protocol.steps.device_plan import dummy_plan
from pagewire.worker.protocol.steps.limits import Limits

log = logging.getLogger(__name__)

# An H200 computes 206 bfloat16 operations (989 TFLOP/s) in the time of reading a byte (4.8 TB/s). A
# token takes one operation for each byte of weights. 256 is the next larger captured step.
PIGGYBACK_TOKENS = 256
DECODES = 32
CHUNKS = 8
# Piggybacked prefill delays the first token. Its time for a prompt token must therefore be below
# this part of a large step's time for a prompt token.
MAX_RELATIVE_COST = 0.8


def measure_piggyback(backend: Backend, limits: Limits, measure: MeasureSeconds) -> int:
    """`PIGGYBACK_TOKENS` if piggybacked prefill saves time, else 0.

    Also 0 if the limits do not allow the measured steps.
    """
    length = PIGGYBACK_TOKENS - DECODES
    if (
        limits.num_slots < DECODES
        or limits.max_num_batched_tokens < DECODES + CHUNKS * length
        or limits.max_model_len < length
    ):
        return 0

    def seconds(chunks: int) -> float:
        plan = dummy_plan(limits, DECODES, chunks, length)
        return median_seconds(measure, step_runner(backend, plan))

    decodes = seconds(0)
    piggybacked, in_large_step = seconds(1) - decodes, (seconds(CHUNKS) - decodes) / CHUNKS
    log.info(
        "a prompt token beside %d decodes takes %.1f us in a step of %d tokens, %.1f us in a large "
        "step",
        DECODES,
        piggybacked / length * 1e6,
        PIGGYBACK_TOKENS,
        in_large_step / length * 1e6,
    )
    return PIGGYBACK_TOKENS if piggybacked < MAX_RELATIVE_COST * in_large_step else 0
