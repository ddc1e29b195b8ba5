"""The tiles of a GEMM in the reference order.

Tiles change the time of a GEMM and never its bits, so they may depend on the number of tokens.
`benchmarks/kernels/invariant_gemms.py` times them. Tiles for one to four tokens are not measured on
a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.linear_config import SkinnyConfig
from pagewire.worker.ops.triton.linear_config import linear_config as usual_config

MIN_COLUMNS = 16  # of a tile: a tensor core multiplies this many at a time


@dataclass(frozen=True, slots=True)
class OrderedConfig:
    """A program multiplies tiles of `rows` weight rows by `block_k` with `tokens` tokens.

    It loads `ahead` tiles of weights, at most as many as a row has, before it waits for the
    preceding kernel. It then loads `stages` tiles at a time.
    """

    rows: int
    block_k: int
    tokens: int
    warps: int
    stages: int
    ahead: int = 1


def ordered_config(tokens: int, rows: int, k: int, item_size: int) -> OrderedConfig | None:
    """Choose the tiles for a weight `[rows, k]`; None where cuBLAS is faster.

    cuBLAS computes the same numbers of tokens as without this mode, by an algorithm whose bits were
    compared with those of these kernels.
    """
    usual = usual_config(tokens, rows, k, item_size)
    if usual is None:
        return None
    if isinstance(usual, SkinnyConfig):
        return OrderedConfig(
            rows=usual.rows,
            block_k=usual.block_k,
            tokens=max(8, next_power_of_2(tokens)),
            warps=usual.warps,
            stages=usual.stages,
        )
    return few_tokens(tokens, k, item_size)


def few_tokens(tokens: int, k: int, item_size: int) -> OrderedConfig:
    """Return the tiles for up to eight tokens.

    The time is that of reading the weights. Tiles are small so that there are many programs. Each
    program loads up to four tiles while the preceding kernel ends.
    """
    block_k = _columns(k, 256 if item_size == 2 else 64)
    ahead = max(1, min(4, k // block_k))
    return OrderedConfig(
        rows=16, block_k=block_k, tokens=max(8, next_power_of_2(tokens)), warps=4, stages=4,
        ahead=ahead,
    )  # fmt: skip


def any_tokens(tokens: int, k: int, item_size: int) -> OrderedConfig:
    """Return tiles for numbers of tokens for which cuBLAS has no algorithm in this order."""
    if item_size != 2:
        return OrderedConfig(rows=32, block_k=_columns(k, 32), tokens=32, warps=4, stages=2)
    if tokens <= 64:
        columns = max(16, next_power_of_2(tokens))
        return OrderedConfig(rows=64, block_k=_columns(k, 64), tokens=columns, warps=4, stages=4)
    return OrderedConfig(rows=128, block_k=_columns(k, 64), tokens=128, warps=8, stages=4)


def _columns(k: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `k`, and MIN_COLUMNS at least."""
    return max(MIN_COLUMNS, min(most, k & -k))
