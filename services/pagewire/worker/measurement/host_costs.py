"""What copying blocks and computing prompts takes on this device, measured before it serves."""

from functools import partial

import numpy as np

from pagewire.worker.measurement.timing import SecondsOf, computing, median_seconds
from pagewire.worker.protocol.backend import Backend, HostCosts
from pagewire.worker.protocol.steps.device_plan import rehearsal
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import StepHostCopies

COPIED_BLOCKS = 64
# Tokens of the prompts that are timed.
CPU_TOKENS = 64
GPU_TOKENS = 2048

_NONE = np.zeros(0, np.int32)


def measure_costs(backend: Backend, limits: Limits, seconds_of: SecondsOf) -> HostCosts:
    """Times copies of blocks that no sequence has yet, and prompts of the padding slot.

    `seconds_of` calls a function and says how long what that did takes on the device. There are
    host blocks.
    """
    count = min(COPIED_BLOCKS, limits.num_blocks - 1, limits.host_blocks)
    blocks = np.arange(1, count + 1, dtype=np.int32)
    host = np.arange(count, dtype=np.int32)

    def save() -> None:
        backend.copy(StepHostCopies(blocks, host, _NONE, _NONE))

    def load() -> None:
        backend.copy(StepHostCopies(_NONE, _NONE, host, blocks))

    seconds = partial(median_seconds, seconds_of)
    most = min(limits.max_num_batched_tokens, max(1, limits.max_model_len // 2))
    tokens = min(most, CPU_TOKENS if backend.synchronous else GPU_TOKENS)
    behind = limits.max_model_len - tokens

    def prefill(begin: int) -> float:
        plan = rehearsal(limits, 0, chunks=1, chunk_length=tokens, chunk_start=begin)
        return seconds(computing(backend, plan))

    first, last = prefill(0), prefill(behind)
    pair = max(0.0, (last - first) / (tokens * behind)) if behind else 0.0
    pairs_of_first = tokens * (tokens - 1) / 2
    return HostCosts(
        save_block=seconds(save) / count,
        load_block=seconds(load) / count,
        prefill_token=max(1e-9, (first - pair * pairs_of_first) / tokens),
        prefill_pair=pair,
    )
