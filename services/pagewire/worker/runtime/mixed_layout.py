"""The packed inputs of captured mixed steps: decode rows and prefill chunks, padded to a size."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.model.decoder import Batch, Prefill
from pagewire.worker.protocol.steps.device_plan import Chunks, DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.upload import ALIGNMENT

Values = TypeVar("Values")

# Stands for the token that the slot sampled last.
LAST_SAMPLED = -1


@dataclass(frozen=True, slots=True, order=True)
class BodySize:
    """What a captured body has room for: `tokens` in all, `chunks` of them, `decodes` rows."""

    tokens: int
    chunks: int
    decodes: int

    def holds(self, plan: DevicePlan) -> bool:
        """Whether the plan's tokens, chunks and decode rows fit."""
        chunks = 0 if plan.chunks is None else len(plan.chunks.slots)
        tokens = plan.num_decodes + plan.num_prefilled
        return tokens <= self.tokens and chunks <= self.chunks and plan.num_decodes <= self.decodes


@dataclass(frozen=True, slots=True)
class BodyInputs(Generic[Values]):
    """Inputs of the layers, int32; tensors on the device, or arrays on their way there.

    The tokens are the decode rows, then the chunks one by one, then padding.
    """

    token_ids: Values  # [tokens], LAST_SAMPLED for decode rows
    positions: Values  # [tokens]
    slots: Values  # [tokens]
    decode_lengths: Values  # [decodes], KV tokens; -1 behind the last decode row
    chunk_slots: Values  # [chunks]
    chunk_starts: Values  # [chunks + 1]
    chunk_lengths: Values  # [chunks], 0 behind the last chunk


def body_sizes(limits: Limits) -> list[BodySize]:
    """Sizes to capture, smallest first: an eighth of the tokens apart, so little is padding.

    A size has room for chunks of 32 tokens on average; programs of attention without work cost
    time, so only the largest has room for a chunk in every slot.
    """
    most = limits.max_num_batched_tokens
    steps = (*range(32, 128, 32), *range(128, 512, 64), *range(512, 1024, 128))
    steps = (*steps, *range(1024, 2048, 256), *range(2048, most, 512), most)

    def size(tokens: int, chunks: int) -> BodySize:
        return BodySize(tokens, min(limits.num_slots, chunks), min(limits.num_slots, tokens))

    # One less than a power of two: the kernel counts the padding as a chunk.
    sizes = {size(tokens, max(8, tokens // 32 - 1)) for tokens in steps if tokens <= most}
    return sorted(sizes | {size(most, limits.num_slots)})


def split_body(values: Values, size: BodySize) -> "BodyInputs[Values]":
    """Views of one buffer `values [body_length(size)]`, each where Triton wants pointers."""
    views, at = [], 0
    for length in _lengths(size):
        views.append(values[at : at + length])  # type: ignore[index]
        at += _aligned(length)
    return BodyInputs(*views)


def body_length(size: BodySize) -> int:
    """Values of the packed inputs."""
    return sum(_aligned(length) for length in _lengths(size))


def pack_body(plan: DevicePlan, chunks: Chunks, size: BodySize, padding_slot: int) -> Int32Array:
    """The packed inputs of a plan that `size` holds."""
    packed = np.zeros(body_length(size), np.int32)
    inputs = split_body(packed, size)
    decodes, used = plan.num_decodes, len(chunks.slots)
    end = decodes + plan.num_prefilled
    inputs.token_ids[:decodes] = LAST_SAMPLED
    inputs.token_ids[decodes:end] = chunks.tokens
    inputs.positions[:decodes] = plan.decode_positions
    inputs.positions[decodes:end] = chunks.positions
    inputs.slots[:decodes] = plan.decode_slots
    inputs.slots[decodes:end] = np.repeat(chunks.slots, np.diff(chunks.starts))
    inputs.slots[end:] = padding_slot
    inputs.decode_lengths[:decodes] = plan.decode_positions + 1
    inputs.decode_lengths[decodes:] = -1  # their places in the output belong to chunks
    inputs.chunk_slots[:used] = chunks.slots
    inputs.chunk_slots[used:] = padding_slot
    # The padding is one more chunk if there is room for it; the others are empty.
    inputs.chunk_starts[: used + 1] = chunks.starts + decodes
    inputs.chunk_starts[used + 1 :] = size.tokens
    inputs.chunk_lengths[:used] = chunks.lengths
    return packed


def body_batch(inputs: BodyInputs[Tensor], size: BodySize, last_tokens: Tensor) -> Batch:
    """The batch of all of a body's tokens; `last_tokens [slots]` are those sampled last."""
    last = last_tokens[inputs.slots]
    return Batch(
        token_ids=torch.where(inputs.token_ids == LAST_SAMPLED, last, inputs.token_ids),
        positions=inputs.positions,
        slots=inputs.slots,
        num_decodes=size.decodes,
        decode_lengths=inputs.decode_lengths,
        prefill=Prefill(inputs.chunk_slots, inputs.chunk_starts, inputs.chunk_lengths, size.tokens),
    )


def _lengths(size: BodySize) -> tuple[int, ...]:
    tokens, chunks = size.tokens, size.chunks
    return (tokens, tokens, tokens, size.decodes, chunks, chunks + 1, chunks)


def _aligned(length: int) -> int:
    return length + -length % ALIGNMENT
