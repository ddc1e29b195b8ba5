"""Checks of a decoded step against the limits. A step that fails them breaks the protocol."""

import numpy as np
from numpy.typing import NDArray

from pagewire.errors import invalid
from pagewire.packing import Int32Array
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import Step, StepHostCopies


def check_step(step: Step, decodes: Int32Array, limits: Limits) -> None:
    """Raises RequestError INVALID_ARGUMENT if the step is malformed.

    `decodes [decodes]` are the slots that decode, those of an earlier step if this one omits them.
    """
    if step.decode_slots is not None:
        _check_slots("decode_slots", decodes, limits)
    if step.starts:
        starts = np.array([start.slot for start in step.starts], np.int64)
        _check_slots("starts", starts, limits)
    _check_slots("append_slots", step.append_slots, limits, repeats=True)
    _check_slots("freed_slots", step.freed_slots, limits)
    for group in step.groups or ():
        _check_slots("group_slots", group.slots, limits)
    _check_slots("prefill_slots", step.prefill_slots, limits)
    if step.host_copies is not None:
        _check_host_copies(step.host_copies, limits)
    tokens, counts = len(decodes), step.prefill_counts
    if len(counts):
        if counts.min() < 1:
            raise invalid(
                "prefill_counts", f"a chunk has {counts.min()} tokens; it must have at least 1"
            )
        tokens += int(counts.sum(dtype=np.int64))
    if tokens > limits.max_num_batched_tokens:
        raise invalid(
            "step",
            f"step {step.number} computes {tokens} tokens; this worker takes at most "
            f"{limits.max_num_batched_tokens} (max_num_batched_tokens)",
        )


def _check_slots(
    field: str, slots: NDArray[np.integer], limits: Limits, *, repeats: bool = False
) -> None:
    if not len(slots):
        return
    if slots.min() < 0 or slots.max() >= limits.num_slots:
        wrong = slots[(slots < 0) | (slots >= limits.num_slots)][0]
        raise invalid(
            field, f"{field} names slot {wrong}; this worker has slots 0 to {limits.num_slots - 1}"
        )
    if not repeats and np.bincount(slots).max() > 1:
        raise invalid(field, f"{field} names a slot twice")


def _check_host_copies(copies: StepHostCopies, limits: Limits) -> None:
    device, host = (1, limits.num_blocks), (0, limits.host_blocks)
    _check_blocks("saved_blocks", copies.saved, *device)
    _check_blocks("saved_host_blocks", copies.saved_host, *host)
    _check_blocks("loaded_host_blocks", copies.loaded_host, *host)
    _check_blocks("loaded_blocks", copies.loaded, *device)


def _check_blocks(field: str, blocks: Int32Array, first: int, end: int) -> None:
    if not len(blocks):
        return
    if blocks.min() < first or blocks.max() >= end:
        wrong = blocks[(blocks < first) | (blocks >= end)][0]
        there = f"blocks {first} to {end - 1}" if end > first else "none (--host-memory-gb)"
        raise invalid(field, f"{field} names block {wrong}; this worker has {there}")
    if len(np.unique(blocks)) < len(blocks):
        raise invalid(field, f"{field} names a block twice")
