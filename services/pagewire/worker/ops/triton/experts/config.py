"""The tiles of the kernels of a mixture of experts, by the number of tokens.

The tables were measured on an H100 and, up to 96 rows of an expert, on an H200, at the sizes of
Qwen3-30B-A3B, in CUDA graphs of several calls, each with its own weights and experts. `pagewire
bench kernels --model qwen3-30b-a3b` times their choices. With `--tune-experts` a worker measures at
its start (`tuning`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagewire.worker.ops.integers import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """A program of the router: `rows` experts times `tokens` tokens, `block_k` columns at a time.

    `warps` warps compute, and `stages` tiles are loading.
    """

    rows: int
    tokens: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """A program of the grouped GEMM: `rows` weight rows times a tile of `tile` rows of an expert.

    `block_k` columns are multiplied at a time by `warps` warps, and `stages` tiles are loading. The
    programs of `group` tiles follow one another.
    """

    tile: int
    rows: int
    block_k: int
    warps: int
    stages: int
    group: int = 8


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """A program for one token: `rows` weight rows, `block_k` columns at a time, `warps` warps."""

    rows: int
    block_k: int
    warps: int


# A configuration is used up to this mean number of rows of an expert.
GEMM_TABLE: tuple[tuple[int, GemmConfig], ...] = (
    (12, GemmConfig(tile=16, rows=64, block_k=128, warps=4, stages=3)),
    (24, GemmConfig(tile=32, rows=64, block_k=64, warps=4, stages=4)),
    (96, GemmConfig(tile=64, rows=64, block_k=64, warps=4, stages=3)),
)
LARGEST = GemmConfig(tile=128, rows=128, block_k=64, warps=8, stages=3)

# A configuration of the router is used up to this number of tokens.
ROUTER_TABLE: tuple[tuple[int, RouterConfig], ...] = (
    (512, RouterConfig(rows=64, tokens=16, block_k=128, warps=4, stages=4)),
    (2048, RouterConfig(rows=16, tokens=32, block_k=256, warps=4, stages=3)),
)
MANY_TOKENS = RouterConfig(rows=64, tokens=64, block_k=64, warps=4, stages=4)
# Up to MAX_SCORED_TOKENS tokens, the product with the router includes the norm. SCORED_ROWS are the
# experts of a program, by the number of tokens up to which they apply.
MAX_SCORED_TOKENS = 64
SCORED_ROWS = {16: 2, 64: 4}
# Up to this many tokens, rows are not sorted by expert: for plain and FP8 weights, and for MXFP4.
MAX_VECTOR_TOKENS, MAX_PACKED_TOKENS = 4, 2

# Tiles that were measured to be faster than the table's, by number of pairs and of experts.
_measured: dict[tuple[int, int], GemmConfig] = {}


def router_config(tokens: int) -> RouterConfig:
    """Choose the tiles of the router."""
    return next((config for most, config in ROUTER_TABLE if tokens <= most), MANY_TOKENS)


def keep_config(pairs: int, num_experts: int, config: GemmConfig) -> None:
    """Make `gemm_config` choose `config` for this size, in this process."""
    _measured[pairs, num_experts] = config


def table_config(pairs: int, num_experts: int) -> GemmConfig:
    """Choose from the table."""
    mean = cdiv(pairs, num_experts)
    return next((config for most, config in GEMM_TABLE if mean <= most), LARGEST)


def quantized_config(tile: int, item_size: int, float4: bool = False) -> GemmConfig:
    """Choose the program of quantized weights for rows that were cut to tiles of `tile` rows.

    `item_size` is the bytes of an element of the inputs; `float4` is for MXFP4. Programs are narrow
    with inputs in float32, or in eight bits, which need more registers for their sums. With a
    multiple of 64 weight rows, Hopper uses one kind of matrix instruction (`ops.triton.quantized`).
    """
    if item_size == 4:
        return GemmConfig(tile=tile, rows=64, block_k=128, warps=4, stages=1)
    if tile >= 128 and float4:
        return GemmConfig(tile=tile, rows=64, block_k=128, warps=4, stages=2)
    if tile >= 128:
        rows, stages = (128, 2) if item_size == 2 else (64, 3)
        return GemmConfig(tile=tile, rows=rows, block_k=128, warps=8, stages=stages)
    return GemmConfig(tile=tile, rows=64, block_k=128, warps=4, stages=3)


def gemm_config(pairs: int, num_experts: int, item_size: int = 2) -> GemmConfig:
    """Choose the tiles of the grouped GEMMs for `pairs` pairs of a token and an expert.

    Both GEMMs of a layer cut its rows to the same tiles, with any size of an element. Elements of
    four bytes do not use tensor cores and get narrow tiles that fit shared memory.
    """
    config = _measured.get((pairs, num_experts)) or table_config(pairs, num_experts)
    return config if item_size == 2 else replace(config, rows=32, block_k=16, stages=2)


def vector_configs(top_k: int, k: int, item_size: int) -> tuple[RowsConfig, RowsConfig]:
    """Choose the programs of both projections for few tokens; `item_size` is a weight's bytes.

    `k` is the columns of the first projection. The second one multiplies the rows of all experts of
    a token side by side.
    """
    slots = next_power_of_2(top_k)
    if item_size == 1:
        gate_up = RowsConfig(rows=2, block_k=min(2048, next_power_of_2(k)), warps=2)
        return gate_up, RowsConfig(rows=4, block_k=max(32, 2048 // slots), warps=8)
    gate_up = RowsConfig(rows=2, block_k=min(1024, next_power_of_2(k)), warps=4)
    return gate_up, RowsConfig(rows=2, block_k=max(32, 2048 // slots), warps=4)
