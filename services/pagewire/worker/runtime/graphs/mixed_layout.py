"""The inputs of captured bodies: decode rows and prefill chunks, padded and packed for one copy."""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.model.decoder import Batch, Prefill
from pagewire.worker.ops.contract.drafts import TokenHistory
from pagewire.worker.protocol.steps.device_plan import Chunks, DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.upload import ALIGNMENT

Values = TypeVar("Values")

# As a token id: the token that the slot sampled last.
LAST_SAMPLED = -1
# Of all sizes but the largest. With more, prefill attention on Hopper uses its slower kernel. One
# less than a power of two, because the kernel counts the padding as a chunk.
MAX_CHUNKS = 255


@dataclass(frozen=True, slots=True, order=True)
class BodySize:
    """The size of a captured body: maximum tokens in all, prefill chunks and decode rows."""

    tokens: int
    chunks: int
    decodes: int

    def holds(self, plan: DevicePlan) -> bool:
        """Whether the tokens, chunks and decode rows of a plan fit."""
        chunks = 0 if plan.chunks is None else len(plan.chunks.slots)
        tokens = plan.num_decodes + plan.num_prefilled
        return tokens <= self.tokens and chunks <= self.chunks and plan.num_decodes <= self.decodes


@dataclass(frozen=True, slots=True)
class BodyInputs(Generic[Values]):
    """The inputs of a body, int32: tensors on the device, or arrays on the host.

    The tokens are the decode rows, then the chunks in order, then padding.
    """

    token_ids: Values  # [tokens], LAST_SAMPLED for decode rows
    positions: Values  # [tokens]
    slots: Values  # [tokens]
    following: Values  # [tokens], the known token after each; 0 if none is known
    decode_lengths: Values  # [decodes], KV tokens; -1 is padding
    chunk_slots: Values  # [chunks]
    chunk_starts: Values  # [chunks + 1]
    chunk_lengths: Values  # [chunks], KV tokens after the chunk; 0 is padding


def body_sizes(limits: Limits) -> list[BodySize]:
    """Sizes to capture, smallest first. Their tokens differ by an eighth to a third.

    Padding chunks cost time in attention, so a size has few chunks: for an average of 32 tokens, or
    more from 8,192 tokens on. Only the largest size has a chunk for every slot.
    """
    max_tokens = limits.max_num_batched_tokens
    steps = (*range(32, 128, 32), *range(128, 512, 64), *range(512, 1024, 128))
    steps = (*steps, *range(1024, 2048, 256), *range(2048, max_tokens, 512), max_tokens)

    def size(tokens: int, chunks: int) -> BodySize:
        return BodySize(tokens, min(limits.num_slots, chunks), min(limits.num_slots, tokens))

    def chunks(tokens: int) -> int:
        return min(MAX_CHUNKS, max(8, tokens // 32 - 1))

    sizes = {size(tokens, chunks(tokens)) for tokens in steps if tokens <= max_tokens}
    return sorted(sizes | {size(max_tokens, limits.num_slots)})


def split_body(values: Values, size: BodySize) -> "BodyInputs[Values]":
    """Views of one buffer `values [body_length(size)]`, each aligned for Triton."""
    views, at = [], 0
    for length in _lengths(size):
        views.append(values[at : at + length])  # type: ignore[index]
        at += _aligned(length)
    return BodyInputs(*views)


def body_length(size: BodySize) -> int:
    """Number of int32 values of the packed inputs."""
    return sum(_aligned(length) for length in _lengths(size))


def pack_body(plan: DevicePlan, chunks: Chunks, size: BodySize, padding_slot: int) -> Int32Array:
    """The packed inputs of a plan that fits into `size`."""
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
    inputs.following[decodes : end - 1] = chunks.tokens[1:]
    inputs.following[chunks.starts[1:] + (decodes - 1)] = chunks.following
    inputs.decode_lengths[:decodes] = plan.decode_positions + 1
    inputs.decode_lengths[decodes:] = -1  # chunks own these rows of the output
    inputs.chunk_slots[:used] = chunks.slots
    inputs.chunk_slots[used:] = padding_slot
    # Padding tokens are one more chunk if `size` has one left. Further padding chunks are empty.
    inputs.chunk_starts[: used + 1] = chunks.starts + decodes
    inputs.chunk_starts[used + 1 :] = size.tokens
    inputs.chunk_lengths[:used] = chunks.lengths
    return packed


def body_batch(inputs: BodyInputs[Tensor], size: BodySize, last_tokens: Tensor) -> Batch:
    """The batch of all tokens of a body. `last_tokens [slots]` are the tokens sampled last."""
    last = last_tokens[inputs.slots]
    return Batch(
        token_ids=torch.where(inputs.token_ids == LAST_SAMPLED, last, inputs.token_ids),
        positions=inputs.positions,
        slots=inputs.slots,
        num_decodes=size.decodes,
        decode_lengths=inputs.decode_lengths,
        prefill=Prefill(inputs.chunk_slots, inputs.chunk_starts, inputs.chunk_lengths, size.tokens),
    )


def located_body(inputs: BodyInputs[Tensor], history: TokenHistory) -> BodyInputs[Tensor]:
    """The inputs with the places of the decode rows, which only the device has."""
    decode = inputs.token_ids == LAST_SAMPLED
    places = torch.zeros_like(inputs.slots)
    rows = history.locate(inputs.slots, places, places)
    decodes = len(inputs.decode_lengths)
    return replace(
        inputs,
        positions=torch.where(decode, rows.positions, inputs.positions),
        slots=torch.where(decode, rows.slots, inputs.slots),
        decode_lengths=torch.where(decode[:decodes], rows.lengths[:decodes], -1),
    )


def _lengths(size: BodySize) -> tuple[int, ...]:
    tokens, chunks = size.tokens, size.chunks
    return (*4 * (tokens,), size.decodes, chunks, chunks + 1, chunks)


def _aligned(length: int) -> int:
    return length + -length % ALIGNMENT
