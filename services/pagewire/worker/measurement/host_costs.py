"""Measures how long block copies and prefill take, for the scheduler to choose between them."""

from functools import partial

import numpy as np

from pagewire.worker.measurement.timing import MeasureSeconds, median_seconds, step_runner
from pagewire.worker.protocol.backend import Backend, HostCosts
from pagewire.worker.protocol.steps.device_plan import dummy_plan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import StepHostCopies

COPIED_BLOCKS = 64
# Tokens of the prefill chunks that are timed.
CPU_TOKENS = 64
GPU_TOKENS = 2048

_NONE = np.zeros(0, np.int32)


def measure_costs(backend: Backend, limits: Limits, measure: MeasureSeconds) -> HostCosts:
    """Times copies of blocks that no sequence has yet, and prefill chunks of the padding slot.

    The worker must have host blocks.
    """
    count = min(COPIED_BLOCKS, limits.num_blocks - 1, limits.host_blocks)
    blocks = np.arange(1, count + 1, dtype=np.int32)
    host = np.arange(count, dtype=np.int32)

    def save() -> None:
        backend.copy(StepHostCopies(blocks, host, _NONE, _NONE))

    def load() -> None:
        backend.copy(StepHostCopies(_NONE, _NONE, host, blocks))

    seconds = partial(median_seconds, measure)
    longest = min(limits.max_num_batched_tokens, max(1, limits.max_model_len // 2))
    tokens = min(longest, CPU_TOKENS if backend.synchronous else GPU_TOKENS)
    context = limits.max_model_len - tokens  # tokens before the second chunk

    def prefill(begin: int) -> float:
        plan = dummy_plan(limits, 0, chunks=1, chunk_length=tokens, chunk_start=begin)
        return seconds(step_runner(backend, plan))

    # A chunk costs `prefill_token` for each token, and `prefill_pair` for each pair of a token and
    # one before it. Two chunks, without and with a context, give both.
    first, last = prefill(0), prefill(context)
    pair = max(0.0, (last - first) / (tokens * context)) if context else 0.0
    pairs_of_first = tokens * (tokens - 1) / 2
    return HostCosts(
        save_block=seconds(save) / count,
        load_block=seconds(load) / count,
        prefill_token=max(1e-9, (first - pair * pairs_of_first) / tokens),
        prefill_pair=pair,
    )
