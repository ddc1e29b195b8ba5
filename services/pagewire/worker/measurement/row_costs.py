"""Measures how long the rows of a decode step take, for the choice of drafts."""

import logging
from collections.abc import Callable

import numpy as np
from torch import Tensor

from pagewire.worker.measurement.timing import MeasureSeconds, median_seconds
from pagewire.worker.protocol.speculation.row_choice import Floats, RowCosts

log = logging.getLogger(__name__)

# Bytes of the KV cache that are copied to measure how fast it is read; more than caches hold.
COPIED_BYTES = 1 << 29


def measure_row_costs(
    steps: dict[int, Callable[[], None]],
    keys: Tensor,
    token_bytes: float,
    measure: MeasureSeconds,
) -> RowCosts:
    """Times steps by their number of rows, and the reading of KV.

    Args:
        steps: by number of rows, a function that runs a step of rows that attend to nothing.
        keys: `[num_blocks, ...]`, a part of the KV cache, zeros except block 0.
        token_bytes: bytes of the KV of a token in all layers.
        measure: times a call.
    """
    rows = np.array(sorted(steps), np.int32)
    seconds = np.array([median_seconds(measure, steps[count]) for count in rows.tolist()])
    # Not block 0, which padding rows have written.
    half = min((len(keys) - 1) // 2, max(1, COPIED_BYTES // max(1, 2 * keys[0].nbytes)))
    token_seconds = 0.0
    if half:

        def copy() -> None:
            keys[1 + half : 1 + 2 * half].copy_(keys[1 : 1 + half])

        token_seconds = token_bytes * median_seconds(measure, copy) / (2 * half * keys[0].nbytes)
    log.info(
        "a decode step of %d rows takes %.2f ms beside attention, one of %d rows %.2f ms; a row "
        "reads the KV of 1,000 tokens in %.3f ms",
        rows[0],
        seconds[0] * 1e3,
        rows[-1],
        seconds[-1] * 1e3,
        token_seconds * 1e6,
    )
    return RowCosts(rows, seconds, token_seconds)


def measure_passes(
    passes: dict[int, Callable[[], None]], costs: RowCosts, measure: MeasureSeconds
) -> Floats:
    """The seconds `[n]` of a draft model's pass, for each number of sequences in `costs.rows [n]`.

    `passes` run a pass, by number of sequences. Larger numbers get the time of the largest one.
    """
    rows = np.array(sorted(passes), np.int32)
    seconds = np.array([median_seconds(measure, passes[count]) for count in rows.tolist()])
    log.info(
        "a pass of the draft model takes %.0f %% of a step's time at %d rows, and %.0f %% at %d",
        100 * seconds[0] / costs.seconds[np.searchsorted(costs.rows, rows[0])],
        rows[0],
        100 * seconds[-1] / costs.seconds[np.searchsorted(costs.rows, rows[-1])],
        rows[-1],
    )
    at = np.searchsorted(rows, costs.rows).clip(max=len(rows) - 1)
    found: Floats = seconds[at]
    return found
