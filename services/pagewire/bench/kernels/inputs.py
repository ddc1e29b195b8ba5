"""Random arguments of the operations. As in a worker, blocks and slots have no order."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewire.bench.kernels.shapes import SharedPrefix
from pagewire.limits import MAX_BIASES, MAX_STOP_IDS
from pagewire.worker.ops.contract.sampling import (
    BIASED,
    NO_TOKEN,
    PENALIZED,
    Adjustments,
    SamplingState,
)
from pagewire.worker.ops.contract.shared_prefix import PrefixLimits, SharedPrefixItems
from pagewire.worker.ops.device import multiprocessors
from pagewire.worker.protocol.steps.step import StepPrefixGroup
from pagewire.worker.runtime.prefix_groups import ItemSizes, item_views, pack_items

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Heads:
    """The head layout of a model and its dtype."""

    query: int
    kv: int
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.query}/{self.kv}x{self.dim} {str(self.dtype).removeprefix('torch.')}"

    def kv_bytes(self, positions: int) -> int:
        """Return the bytes of keys and values of `positions`."""
        return 2 * positions * self.kv * self.dim * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Paged:
    """KV caches of the same sequences in several layers."""

    caches: list[tuple[Tensor, Tensor]]  # [num_blocks, kv_heads, block_size, head_dim] each
    tables: Tensor  # [slots, max_blocks] int32
    slots: Tensor  # [rows] int32
    lengths: Tensor  # [rows] int32


def paged(lengths: Sequence[int], heads: Heads, device: torch.device, copies: int = 1) -> Paged:
    """Draw `copies` caches of sequences with these lengths."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    total = sum(counts) + 1
    blocks = (torch.randperm(total - 1) + 1).int()
    width = max(16, -(-max(counts) // 16) * 16)
    order = torch.randperm(len(lengths))
    tables = torch.zeros(len(lengths) + 1, width, dtype=torch.int32)
    for row, run in zip(order.tolist(), blocks.split(counts), strict=True):
        tables[row, : len(run)] = run
    to: dict[str, Any] = {"device": device, "dtype": torch.int32}
    caches = _caches(total, heads, device, copies)
    return Paged(caches, tables.to(**to), order.to(**to), torch.tensor(lengths, **to))


def paged_with_shared_prefix(
    prefix: SharedPrefix,
    heads: Heads,
    device: torch.device,
    limits: PrefixLimits,
    copies: int = 1,
) -> tuple[Paged, SharedPrefixItems]:
    """Draw caches of sequences that share prefixes, and the work items as a worker packs them.

    `limits` belong to the timed operations.
    """
    common, own = prefix.shared // BLOCK_SIZE, -(-prefix.own // BLOCK_SIZE)
    total = prefix.groups * common + prefix.rows * own + 1
    blocks = (torch.randperm(total - 1) + 1).int()
    shared, rest = blocks.split((prefix.groups * common, prefix.rows * own))
    tables = torch.zeros(prefix.rows + 1, common + own, dtype=torch.int32)
    group_of = torch.arange(prefix.rows) % prefix.groups
    tables[:-1, :common] = shared.view(prefix.groups, common)[group_of]
    tables[:-1, common:] = rest.view(prefix.rows, own)
    slots = np.arange(prefix.rows, dtype=np.int32)
    members = (slots[group :: prefix.groups] for group in range(prefix.groups))
    sharing = ItemSizes(
        limits=limits,
        kv_heads=heads.kv,
        processors=multiprocessors(device),
        block_size=BLOCK_SIZE,
    )
    groups = tuple(StepPrefixGroup(common, some) for some in members)
    packed = torch.from_numpy(pack_items(groups, slots, prefix.rows, sharing))
    lengths = torch.full((prefix.rows,), prefix.shared + prefix.own, dtype=torch.int32)
    cache = Paged(
        _caches(total, heads, device, copies),
        tables.to(device),
        torch.from_numpy(slots).to(device),
        lengths.to(device),
    )
    return cache, item_views(packed.to(device), prefix.rows, limits.max_ranges)


def prefill_starts(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the start of each chunk of `counts` tokens, then the end of the last chunk; int32."""
    starts = [0, *itertools.accumulate(counts)]
    return torch.tensor(starts, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class RopeInputs:
    """Arguments of `qk_norm_rope_kv_write` for tokens of one sequence in random order."""

    qkv: Tensor  # [tokens, (query_heads + 2 * kv_heads) * head_dim]
    norm: Tensor  # [head_dim]
    cos_sin: Tensor  # [tokens, head_dim]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]
    tables: Tensor  # [slots, blocks]
    shape: tuple[int, int, int, int]  # of each cache

    def arguments(self, qk_norm: bool = True) -> tuple[Any, ...]:
        """Return the arguments between `qkv` and the caches."""
        norm = self.norm if qk_norm else None
        return (norm, norm, 1e-6, self.cos_sin, self.positions, self.slots, self.tables)


def rope_inputs(heads: Heads, tokens: int, device: torch.device) -> RopeInputs:
    """Draw `tokens` tokens of one sequence."""
    blocks = -(-tokens // BLOCK_SIZE)
    width = (heads.query + 2 * heads.kv) * heads.dim
    angles = torch.outer(torch.arange(tokens), 1e4 ** -torch.linspace(0, 1, heads.dim // 2))
    table = 1 + torch.randperm(blocks)
    return RopeInputs(
        qkv=torch.randn(tokens, width, device=device, dtype=heads.dtype),
        norm=torch.randn(heads.dim, device=device, dtype=heads.dtype),
        cos_sin=torch.cat((angles.cos(), angles.sin()), 1).to(device),
        positions=torch.randperm(tokens, device=device).int(),
        slots=torch.ones(tokens, device=device, dtype=torch.int32),
        tables=torch.stack((torch.zeros_like(table), table)).int().to(device),
        shape=(blocks + 1, heads.kv, BLOCK_SIZE, heads.dim),
    )


def sampling_state(rows: int, device: torch.device, **given: float) -> SamplingState:
    """Return rows that all sample with the parameters `given`, each with its own seed."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), given.get(name, default), dtype=dtype, device=device)

    return SamplingState(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=torch.arange(rows, device=device),
        index=column("index", 0, torch.int32),
        min_tokens=column("min_tokens", 0, torch.int32),
        stop_token_ids=torch.full((rows, MAX_STOP_IDS), -1, dtype=torch.int32, device=device),
    )


def penalties_and_biases(rows: int, vocabulary: int, device: torch.device) -> Adjustments:
    """Return all penalties, of outputs of 1,000 tokens, and the maximum number of biases."""
    biases = min(MAX_BIASES, vocabulary)
    counts = torch.zeros((rows, vocabulary), dtype=torch.int16)
    counts.scatter_(1, torch.randint(vocabulary, (rows, min(1000, vocabulary))), 1)
    bias_ids = torch.full((rows, MAX_BIASES), NO_TOKEN, dtype=torch.int32)
    bias_ids[:, :biases] = torch.randperm(vocabulary)[:biases].sort().values
    penalties = torch.tensor([1.1, 0.5, 0.5]).repeat(rows, 1)  # repetition, frequency, presence
    return Adjustments(
        kinds=torch.full((rows,), BIASED | PENALIZED, dtype=torch.int32, device=device),
        slots=torch.arange(rows, dtype=torch.int32, device=device),
        token_counts=counts.to(device),
        penalties=penalties.to(device),
        bias_ids=bias_ids.to(device),
        biases=torch.randn(rows, MAX_BIASES).to(device),
    )


def _caches(
    blocks: int, heads: Heads, device: torch.device, copies: int
) -> list[tuple[Tensor, Tensor]]:
    shape = (blocks, heads.kv, BLOCK_SIZE, heads.dim)
    keys, values = (
        [torch.randn(shape, device=device, dtype=heads.dtype) for _ in range(copies)]
        for _ in range(2)
    )
    return list(zip(keys, values, strict=True))
