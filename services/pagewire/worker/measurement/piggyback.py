"""Whether prompts are computed for less beside decodes, measured on this device before it serves.

A step of few tokens takes as long as its weights are read, one of many as long as they are
computed. Between the two, at the ridge of the roofline, a prompt's tokens ride along with decodes
in time that is spent anyway. In a small model the kernels' own latencies outweigh that.
"""

import logging

from pagewire.worker.measurement.timing import SecondsOf, computing, median_seconds
from pagewire.worker.protocol.backend import Backend
from pagewire.worker.protocol.steps.device_plan import rehearsal
from pagewire.worker.protocol.steps.limits import Limits

log = logging.getLogger(__name__)

# The size of captured steps next above the 206 operations that an H200 computes in bfloat16
# (989 TFLOP/s) in the time of reading a byte (4.8 TB/s); a token takes one for a byte of weights.
TOKENS = 256
DECODES = 32
CHUNKS = 8
# Riding along takes at most this part of the time, or it is not worth cutting a prompt up: then
# somebody waits longer for a first token.
WORTHWHILE = 0.8


def measure_ridge(backend: Backend, limits: Limits, seconds_of: SecondsOf) -> int:
    """`TOKENS` if prompts ride along with decodes for less, 0 if not, or if steps are too small."""
    length = TOKENS - DECODES
    if (
        limits.num_slots < DECODES
        or limits.max_num_batched_tokens < DECODES + CHUNKS * length
        or limits.max_model_len < length
    ):
        return 0

    def seconds(chunks: int) -> float:
        plan = rehearsal(limits, DECODES, chunks, length)
        return median_seconds(seconds_of, computing(backend, plan))

    decodes = seconds(0)
    riding, at_once = seconds(1) - decodes, (seconds(CHUNKS) - decodes) / CHUNKS
    log.info(
        "a prompt token beside %d decodes takes %.1f us in a step of %d tokens, %.1f in a large "
        "one",
        DECODES,
        riding / length * 1e6,
        TOKENS,
        at_once / length * 1e6,
    )
    return TOKENS if riding < WORTHWHILE * at_once else 0
