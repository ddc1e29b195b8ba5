"""The tiles of the kernels of a mixture of experts, by the number of tokens.

The table was chosen by the sizes of Qwen3-30B-A3B and by what compiles for Hopper without spilled
registers. It is not measured yet: `pagewire bench kernels --model qwen3-30b-a3b` does that. With
`--tune-experts` a worker measures at its start (`tuning`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagewire.worker.ops.integers import cdiv


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

    `block_k` columns are multiplied at a time by `warps` warps, and `stages` tiles are loading.
    """

    tile: int
    rows: int
    block_k: int
    warps: int
    stages: int


# The mean number of rows of an expert up to which a configuration is used.
GEMM_TABLE: tuple[tuple[int, GemmConfig], ...] = (
    (4, GemmConfig(tile=16, rows=32, block_k=128, warps=4, stages=4)),
    (16, GemmConfig(tile=16, rows=64, block_k=128, warps=4, stages=4)),
    (48, GemmConfig(tile=32, rows=64, block_k=128, warps=4, stages=3)),
    (128, GemmConfig(tile=64, rows=64, block_k=64, warps=4, stages=4)),
)
LARGEST = GemmConfig(tile=128, rows=128, block_k=64, warps=8, stages=3)

FEW_TOKENS = RouterConfig(rows=16, tokens=16, block_k=256, warps=4, stages=3)
MANY_TOKENS = RouterConfig(rows=64, tokens=64, block_k=64, warps=4, stages=4)
MAX_FEW_TOKENS = 64

# Tiles that were measured to be faster than the table's, by number of pairs and of experts.
_measured: dict[tuple[int, int], GemmConfig] = {}


def router_config(tokens: int) -> RouterConfig:
    """Choose the tiles of the router."""
    return FEW_TOKENS if tokens <= MAX_FEW_TOKENS else MANY_TOKENS


def keep_config(pairs: int, num_experts: int, config: GemmConfig) -> None:
    """Make `gemm_config` choose `config` for this size, in this process."""
    _measured[pairs, num_experts] = config


def table_config(pairs: int, num_experts: int) -> GemmConfig:
    """Choose from the table."""
    mean = cdiv(pairs, num_experts)
    return next((config for most, config in GEMM_TABLE if mean <= most), LARGEST)


def quantized_config(tile: int, item_size: int) -> GemmConfig:
    """Choose the program of quantized weights for rows that were cut to tiles of `tile` rows.

    `item_size` is the bytes of an element of the inputs. Programs with inputs in float32, or with
    those in eight bits, which need more registers for their sums, are narrow. A multiple of 64
    weight rows has one kind of matrix instruction on Hopper (`ops.triton.quantized`).
    """
    if item_size == 4:
        return GemmConfig(tile=tile, rows=64, block_k=128, warps=4, stages=1)
    if tile >= 128:
        rows = 128 if item_size == 2 else 64
        return GemmConfig(tile=tile, rows=rows, block_k=128, warps=8, stages=2)
    return GemmConfig(tile=tile, rows=64, block_k=128, warps=4, stages=3)


def gemm_config(pairs: int, num_experts: int, item_size: int = 2) -> GemmConfig:
    """Choose the tiles of the grouped GEMMs for `pairs` pairs of a token and an expert.

    Both GEMMs of a layer cut its rows to the same tiles, whatever the bytes of an element. Elements
    of four bytes are not for tensor cores: narrow tiles fit the memory of a multiprocessor.
    """
    config = _measured.get((pairs, num_experts)) or table_config(pairs, num_experts)
    return config if item_size == 2 else replace(config, rows=32, block_k=16, stages=2)
