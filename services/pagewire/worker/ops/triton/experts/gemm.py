"""The grouped GEMM of plain weights: rows of experts times the weights of these experts.

One accumulator walks the columns of a weight in order, so the bits of a row depend neither on the
tiles nor on other rows (docs/gpu.md).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ClampedSwiglu, ExpertRows
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.experts.config import GemmConfig, gemm_config
from pagewire.worker.ops.triton.experts.tile import clamp_numbers, finish_tile, place_of


@triton.jit(do_not_specialize=["tiles"])
def _grouped_kernel(
    x_ptr,  # [tokens, K] with GATHER, else [pairs, K]
    weight_ptr,  # [experts, features, K], with GATED [experts, 2 * features, K]
    bias_ptr,  # [experts, features], with GATED [experts, 2 * features], or None
    out_ptr,  # [pairs, features]
    pairs_ptr,  # [pairs]
    starts_ptr,  # [experts + 1]
    tiles_ptr,  # [2, tiles]
    tiles,
    features,
    x_stride,
    alpha,
    limit,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    CLAMPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS weight rows of one expert by a tile of its rows.

    The grid is `[tiles * features / ROWS]` in the order of `place_of`. Weights are the left
    operand, because a matrix instruction has more rows than columns.

    GATED: gate and up projections are computed side by side, and the output is `silu(gate) * up`,
    or with CLAMPED that of `ClampedSwiglu`.
    GATHER: the input is by token and not by row.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, block = place_of(tl.program_id(0), tiles, tl.cdiv(features, ROWS), GROUP)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tiles_ptr + tiles + tile) + tl.arange(0, TILE)  # [TILE]
    inside = row < tl.load(starts_ptr + expert + 1)
    source = row
    if GATHER:
        source = tl.load(pairs_ptr + row, mask=inside, other=0) // TOP_K
    output = block * ROWS + tl.arange(0, ROWS)  # [ROWS]
    # Weight rows past the end repeat the last one and are not stored.
    held = tl.minimum(output, features - 1)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
    of_expert = weight_ptr + expert.to(tl.int64) * ((1 + GATED) * features * K)
    weight = of_expert + held * K + column  # [ROWS, BLOCK_K]
    x_tile = x_ptr + source.to(tl.int64)[:, None] * x_stride + column  # [TILE, BLOCK_K]

    acc = tl.zeros((ROWS, TILE), tl.float32)
    up = acc
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K:
            w = tl.load(weight + start, mask=start + column < K, other=0.0)
            x_mask = inside[:, None] & (start + column < K)
        else:
            w = tl.load(weight + start)
            x_mask = inside[:, None]
        x = tl.load(x_tile + start, mask=x_mask, other=0.0)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
        if GATED:
            u = weight + features * K + start
            w = tl.load(u, mask=start + column < K, other=0.0) if K % BLOCK_K else tl.load(u)
            up = tl.dot(w, x.T, up, input_precision="ieee")
    finish_tile(
        out_ptr, bias_ptr, acc, up, expert, row, inside, output, features, alpha, limit,
        GATED, CLAMPED,
    )  # fmt: skip


def multiply_plain(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    rows: ExpertRows,
    bias: Tensor | None,
    clamp: ClampedSwiglu | None,
    config: GemmConfig | None,
    *,
    gated: bool,
) -> Tensor:
    """Write the GEMM of `rows` to `out`. The input is by token if `gated`, else by row."""
    pairs, features = out.shape
    config = config or gemm_config(pairs, weight.shape[0], weight.element_size())
    if config.tile != rows.tile:
        raise ValueError(f"config.tile is {config.tile}, but the rows were cut to {rows.tile}")
    tiles = rows.tiles.shape[1]
    pdl = dependent_launch(x.device)
    _grouped_kernel[(tiles * cdiv(features, config.rows),)](
        x,
        weight,
        bias,
        out,
        rows.pairs,
        rows.starts,
        rows.tiles,
        tiles,
        features,
        x.stride(0),
        *clamp_numbers(clamp),
        K=weight.shape[2],
        TOP_K=rows.top_k,
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        TILE=config.tile,
        STAGES=config.stages,
        GROUP=config.group,
        GATED=gated,
        GATHER=gated,
        CLAMPED=clamp is not None,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out
