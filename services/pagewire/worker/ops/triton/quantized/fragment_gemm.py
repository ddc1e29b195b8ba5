"""The GEMM of arranged weights in four bits with plain inputs on Hopper, written in Gluon.

A program has a loader, which is one warp, and one or two warp groups of four warps that consume.
The loader copies runs of weights and inputs to shared memory by TMA. A consumer widens 64 rows in
registers, which the tensor cores read. It widens half a run while they multiply the previous half.

Where a round of programs would leave multiprocessors idle, several programs share the columns of a
tile, in parts. The last program adds up the sums: its own first, then the others in the order of
the columns. A tile of one program has sums in the order of `grouped`, and the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.quantized import RUN, GroupedWeight
from pagewire.worker.ops.device import dependent_launch, multiprocessors
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.quantized.exchange import shared_sums
from pagewire.worker.ops.triton.quantized.fragments import BLOCK, LINE
from pagewire.worker.ops.triton.quantized.hopper import next_stage

SIDE = gl.constexpr(BLOCK)  # weight rows of a consumer
COLUMNS = gl.constexpr(RUN)
HALF = gl.constexpr(RUN // 2)
WORDS = gl.constexpr(RUN // 4)  # of 16 bits in a run of a row
LINES = gl.constexpr(BLOCK // 2)  # of 128 bytes in a run of a block
PAIRS = gl.constexpr(LINE)
# Tiles of tokens whose programs run at once, so that they read the same weights from the L2 cache.
GROUP_TILES = gl.constexpr(8)
LOADER_REGISTERS = gl.constexpr(40)
MAX_PARTS = 6
# What another part of a tile costs: microseconds for each, and for each of its sums.
PART_COST = 0.4
SUM_COST = 3e-4


@dataclass(frozen=True, slots=True)
class Shape:
    """The tile of a program, `consumers` times 64 rows by `tokens`.

    The tokens are one power of two, or the sum of several, largest first. Each is a piece with sums
    of its own, and a weight is widened once for all pieces. `stages` runs are in shared memory;
    `programs` run at once on a multiprocessor. A run takes `alone` microseconds, and up to
    `crowding` more while other programs run, on an H200; up to 32 tokens on an H100.
    """

    consumers: int
    tokens: int
    stages: int
    programs: int
    alone: float
    crowding: float

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return self.consumers * BLOCK

    @property
    def box(self) -> int:
        """Tokens that are copied at once; boxes without tokens are not copied."""
        smallest = self.tokens & -self.tokens
        return smallest if smallest < self.tokens else max(8, self.tokens // 4)

    @property
    def registers(self) -> int:
        """Registers of a thread, on average."""
        if self.consumers == 1:
            return {1: 128, 2: 128, 3: 80}[self.programs]
        return {1: 168, 2: 80}[self.programs]


SHAPES = (
    Shape(1, 8, 8, 3, alone=0.14, crowding=0.52),
    Shape(1, 16, 6, 3, alone=0.15, crowding=0.58),
    Shape(1, 32, 5, 3, alone=0.17, crowding=0.53),
    Shape(2, 32, 5, 2, alone=0.30, crowding=0.63),
    Shape(1, 64, 5, 2, alone=0.30, crowding=0.25),
    Shape(2, 64, 4, 2, alone=0.83, crowding=0.15),
    Shape(2, 64, 6, 1, alone=0.39, crowding=0.16),
    Shape(1, 96, 6, 1, alone=0.35, crowding=0.06),
    Shape(1, 128, 5, 1, alone=0.29, crowding=0.16),
    Shape(2, 128, 4, 1, alone=0.53, crowding=0.28),
    Shape(1, 160, 4, 1, alone=0.39, crowding=0.17),
    Shape(2, 160, 4, 1, alone=0.76, crowding=0.30),
    Shape(1, 192, 4, 1, alone=0.56, crowding=0.09),
    Shape(2, 192, 3, 1, alone=0.89, crowding=0.28),
    Shape(2, 256, 3, 1, alone=0.88, crowding=0.60),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The programs of a product: each computes a tile, and `parts` share each of the last ones."""

    shape: Shape
    shared: int = 0  # the last tiles
    parts: int = 1

    def tiles(self, tokens: int, features: int) -> int:
        """Count the tiles of a product."""
        return cdiv(features, self.shape.rows) * cdiv(tokens, self.shape.tokens)

    def microseconds(self, tiles: int, runs: int, processors: int) -> float:
        """Estimate the time of all tiles."""
        shape = self.shape
        slots = processors * shape.programs
        rounds, rest = divmod(tiles - self.shared, slots)
        taken = rounds * runs * (shape.alone + shape.crowding)
        taken += (rest > 0) * runs * (shape.alone + shape.crowding * rest / slots)
        if not self.shared:
            return taken
        busy = self.shared * self.parts / slots
        taken += cdiv(runs, self.parts) * (shape.alone + shape.crowding * busy)
        # The last program of a tile waits for the others, and for the transfer of their sums.
        return taken + (self.parts - 1) * (PART_COST + shape.rows * shape.tokens * SUM_COST)


def plans(shape: Shape, tokens: int, features: int, runs: int, processors: int) -> Iterator[Plan]:
    """List the plans of a shape: without parts, and with parts of each tile of the last round."""
    yield Plan(shape)
    slots = processors * shape.programs
    if rest := Plan(shape).tiles(tokens, features) % slots:
        for parts in range(2, min(MAX_PARTS, runs, slots // rest) + 1):
            yield Plan(shape, rest, parts)


@cache
def choose(tokens: int, features: int, k: int, processors: int, whole: bool = False) -> Plan:
    """Choose the plan with the least time; with `whole`, among those without parts."""
    runs = k // RUN
    found = []
    for shape in SHAPES:
        if shape.consumers == 1 and tokens > 4 * shape.tokens:
            continue  # inputs would be read too often
        for plan in plans(shape, tokens, features, runs, processors):
            if not (whole and plan.shared):
                time = plan.microseconds(plan.tiles(tokens, features), runs, processors)
                found.append((time, shape.tokens, plan))
    return min(found, key=lambda each: each[:2])[2]


def multiply(
    x: Tensor,
    weight: GroupedWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    add: bool = False,
    plan: Plan | None = None,
    whole: bool = False,
) -> None:
    """Store `x @ weight.T + bias` in `out`; with `add`, add it to `out`.

    The weight is arranged and its `order` ignored. With `whole`, no tile is shared, and the bits do
    not depend on the number of tokens.
    """
    assert weight.pairs is not None
    assert x.dtype == weight.scales.dtype
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    (tokens, k), features = x.shape, weight.shape[0]
    plan = plan or choose(tokens, features, k, multiprocessors(x.device), whole)
    shape = plan.shape
    unshared = plan.tiles(tokens, features) - plan.shared
    partials, flags = shared_sums(x.device)
    assert plan.shared * (plan.parts - 1) * shape.rows * shape.tokens <= partials.numel()
    assert unshared >= 0
    assert plan.parts <= k // RUN
    of_words = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    of_pairs = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=32, rank=2)
    of_inputs = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    words = weight.values.view(torch.int16).view(-1, 2 * WORDS.value)
    pairs = weight.pairs.view(-1, LINE)
    pdl = dependent_launch(x.device)
    launch = {"launch_pdl": True} if pdl else {}
    fragment_gemm_kernel[(unshared + plan.shared * plan.parts,)](
        TensorDescriptor.from_tensor(x, [shape.box, HALF.value], of_inputs),
        TensorDescriptor.from_tensor(words, [LINES.value, 2 * WORDS.value], of_words),
        TensorDescriptor.from_tensor(pairs, [BLOCK // LINE, LINE], of_pairs),
        weight.pairs if bias is None else bias,
        out,
        partials,
        flags,
        tokens,
        features,
        k,
        weight.pairs.shape[1],
        unshared,
        plan.parts,
        GROUP=weight.group,
        CONSUMERS=shape.consumers,
        BLOCK_T=shape.tokens,
        BOX=shape.box,
        STAGES=shape.stages,
        SHARED=plan.shared > 0,
        ADD=add,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=4 * shape.consumers,
        maxnreg=shape.registers,
        **launch,
    )


@gluon.constexpr_function
def _of_store(rows, tokens):
    """A thread stores eight features of a token, 16 bytes, or four, 8 bytes."""
    held = [[1, 0], [2, 0], [4, 0]]
    spread = [[2**i, 0] for i in range(3, rows.bit_length() - 1)]
    spread += [[0, 2**i] for i in range(tokens.bit_length() - 1)]
    threads = (2 * rows).bit_length() - 1
    if len(spread) < threads:
        held, spread = held[:2], [[4, 0], *spread]
    return gl.DistributedLinearLayout(
        held + spread[threads:], spread[:5], spread[5:threads], [], [rows, tokens]
    )


@gluon.constexpr_function
def _count(tokens):
    """Return the number of pieces of a tile: powers of two that add up to its tokens."""
    return tokens.bit_count()


@gluon.constexpr_function
def _piece(tokens, index):
    """Return the tokens of a piece; the first is the largest."""
    for _ in range(index):
        tokens -= 1 << (tokens.bit_length() - 1)
    return 1 << (tokens.bit_length() - 1)


@gluon.constexpr_function
def _before(tokens, index):
    """Return the tokens of the pieces before a piece."""
    return sum(_piece(tokens, i) for i in range(index))


@gluon.jit(do_not_specialize=["tokens", "whole", "parts"])
def fragment_gemm_kernel(
    x_tiles,  # descriptor of [tokens, K]
    words,  # descriptor of [blocks * runs * LINES, 2 * WORDS] in 16 bits
    pairs,  # descriptor of [blocks * groups * lines, PAIRS]
    bias_ptr,  # [features]
    out_ptr,  # [tokens, features]
    partial_ptr,  # the sums of parts
    flags_ptr,
    tokens,
    features,
    K,
    groups,
    whole,  # tiles that are not shared
    parts,  # of a shared tile
    GROUP: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply CONSUMERS * 64 weight rows by BLOCK_T tokens, or a part of their columns.

    The grid is `[whole + parts * shared tiles]`. Programs of a shared tile are neighbours. The last
    one waits for the others, which began before it.
    """
    dtype: gl.constexpr = x_tiles.dtype
    tiled: gl.constexpr = x_tiles.layout
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ROWS: gl.constexpr = CONSUMERS * SIDE
    x_smem = ()
    for i in gl.static_range(_count(BLOCK_T)):
        piece = gl.allocate_shared_memory(dtype, [STAGES * 2, _piece(BLOCK_T, i), HALF], tiled)
        x_smem += (piece,)  # type: ignore[assignment]
    w_smem = gl.allocate_shared_memory(
        gl.int16, [STAGES, CONSUMERS * LINES, 2 * WORDS], words.layout
    )
    p_smem = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS // PAIRS, PAIRS], pairs.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    runs = K // COLUMNS
    tile = gl.program_id(0)
    part = 0
    first = 0
    last = runs
    if SHARED:  # noqa: SIM102 (known to the compiler)
        if tile >= whole:
            part = (tile - whole) % parts
            tile = whole + (tile - whole) // parts
            first = part * runs // parts
            last = (part + 1) * runs // parts
    token_tiles = gl.cdiv(tokens, BLOCK_T)
    a_group = GROUP_TILES * gl.cdiv(features, ROWS)
    begin = tile // a_group * GROUP_TILES
    height = gl.minimum(token_tiles - begin, GROUP_TILES)
    token = (begin + tile % a_group % height) * BLOCK_T
    row = tile % a_group // height * ROWS
    gl.warp_specialize(
        [
            (_consume, (
                row, token, first, last, tile - whole, part, parts, bias_ptr, out_ptr, partial_ptr,
                flags_ptr, tokens, features, x_smem, w_smem, p_smem, full, empty, CONSUMERS,
                BLOCK_T, STAGES, SHARED, ADD, BIAS, PDL,
            )),
            (_load, (
                row, token, first, last, runs, groups, x_tiles, words, pairs, x_smem, w_smem,
                p_smem, full, empty, tokens, GROUP, CONSUMERS, BLOCK_T, BOX, STAGES, PDL,
            )),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load(
    row,
    token,
    first,
    last,
    runs,
    groups,
    x_tiles,
    words,
    pairs,
    x_smem,
    w_smem,
    p_smem,
    full,
    empty,
    tokens,
    GROUP: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Load the runs from `first` on; the first weights load while inputs may still be computed."""
    BOXES: gl.constexpr = BLOCK_T // BOX
    boxes = gl.minimum(gl.cdiv(tokens - token, BOX), BOXES)
    for stage in gl.static_range(STAGES):
        there = first + stage < last
        _expect(full, stage, boxes, there, CONSUMERS, BOX, BOXES)
        _load_weights(
            row, first + stage, runs, groups, words, pairs, w_smem, p_smem, full, stage, there,
            GROUP, CONSUMERS,
        )  # fmt: skip
    if PDL:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        _load_inputs(
            token, first + stage, x_tiles, x_smem, full, stage, boxes, first + stage < last,
            BLOCK_T, BOX,
        )  # fmt: skip
    stage = 0
    phase = 0
    for run in range(first + STAGES, last):
        mbarrier.wait(empty.index(stage), phase)
        _expect(full, stage, boxes, True, CONSUMERS, BOX, BOXES)
        _load_weights(
            row, run, runs, groups, words, pairs, w_smem, p_smem, full, stage, True, GROUP,
            CONSUMERS,
        )  # fmt: skip
        _load_inputs(token, run, x_tiles, x_smem, full, stage, boxes, True, BLOCK_T, BOX)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _expect(
    full,
    stage,
    boxes,
    there,
    CONSUMERS: gl.constexpr,
    BOX: gl.constexpr,
    BOXES: gl.constexpr,
):
    """Let a stage expect the bytes of a run; their number must be known to the compiler."""
    BYTES: gl.constexpr = CONSUMERS * SIDE * (HALF + 4)
    for count in gl.static_range(1, BOXES + 1):
        mbarrier.expect(
            full.index(stage), BYTES + count * BOX * COLUMNS * 2, pred=there & (boxes == count)
        )


@gluon.jit
def _load_weights(
    row,
    run,
    runs,
    groups,
    words,
    pairs,
    w_smem,
    p_smem,
    full,
    stage,
    there,
    GROUP: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Load the words and pairs of a run, a block at a time."""
    HEIGHT: gl.constexpr = SIDE // PAIRS
    for i in gl.static_range(CONSUMERS):
        block = row // SIDE + i
        tma.async_copy_global_to_shared(
            words,
            [(block * runs + run) * LINES, 0],
            full.index(stage),
            w_smem.index(stage).slice(i * LINES, LINES),
            pred=there,
        )
        tma.async_copy_global_to_shared(
            pairs,
            [(block * groups + run * COLUMNS // GROUP) * HEIGHT, 0],
            full.index(stage),
            p_smem.index(stage).slice(i * HEIGHT, HEIGHT),
            pred=there,
        )


@gluon.jit
def _load_inputs(
    token,
    run,
    x_tiles,
    x_smem,
    full,
    stage,
    boxes,
    there,
    BLOCK_T: gl.constexpr,
    BOX: gl.constexpr,
):
    """Load both halves of a run of inputs, in boxes, because rows past the end take longer."""
    for piece in gl.static_range(_count(BLOCK_T)):
        for i in gl.static_range(_piece(BLOCK_T, piece) // BOX):
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_tiles,
                    [token + _before(BLOCK_T, piece) + i * BOX, run * COLUMNS + half * HALF],
                    full.index(stage),
                    x_smem[piece].index(stage * 2 + half).slice(i * BOX, BOX),
                    pred=there & (_before(BLOCK_T, piece) // BOX + i < boxes),
                )


@gluon.jit
def _words(w_smem, p_smem, stage, ROWS: gl.constexpr):
    """Load the words of a run and both halves of its pairs, each in both halves of 32 bits."""
    more_words: gl.constexpr = [[64, 0]] if ROWS == 128 else []
    more_lines: gl.constexpr = [[32, 0]] if ROWS == 128 else []
    more_pairs: gl.constexpr = [[8, 0]] if ROWS == 128 else []
    # The rows `g` and `g + 8` of each 16 belong to a thread.
    of_words: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]] + more_words,  # noqa: RUF005 (not known to the compiler)
        [],
        [ROWS, WORDS],
    )
    of_lines: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [4, 0]],
        [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        [[8, 0], [16, 0]] + more_lines,  # noqa: RUF005
        [],
        [ROWS // 2, 2 * WORDS],
    )
    of_pairs: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0]],
        [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        [[2, 0], [4, 0]] + more_pairs,  # noqa: RUF005
        [],
        [ROWS // PAIRS, PAIRS],
    )
    words = w_smem.index(stage).load(of_lines).reshape([ROWS, WORDS])
    pair = p_smem.index(stage).load(of_pairs).reshape([ROWS])
    pair = gl.convert_layout(pair, gl.SliceLayout(1, of_words))
    scale, middle = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0, 0x1010; prmt.b32 $1, $2, 0, 0x3232;",
        "=&r,=r,r",
        [pair],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.convert_layout(words, of_words), scale[:, None], middle[:, None]


@gluon.jit
def _widened(words, scale, middle, dtype: gl.constexpr, FAR: gl.constexpr):
    """Return the near or far half of a run as weights `[rows, 64]`, rounded once.

    `middle` is `magic` plus the zero point, so the difference is exact.
    """
    bfloat16: gl.constexpr = dtype == gl.bfloat16
    mask: gl.constexpr = "0x000F000F, 0x43004300" if bfloat16 else "0x00F000F0, 0x54005400"
    kind: gl.constexpr = "bf16x2" if bfloat16 else "f16x2"
    if bfloat16:
        moves: gl.constexpr = (
            "shr.b32 a, $2, 4; shr.b32 b, $2, 12; " if FAR else "mov.b32 a, $2; shr.b32 b, $2, 8; "
        )
    else:
        moves: gl.constexpr = (  # type: ignore[no-redef]
            "mov.b32 a, $2; shr.b32 b, $2, 8; " if FAR else "shl.b32 a, $2, 4; shr.b32 b, $2, 4; "
        )
    near, behind = gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; " + moves
        + "lop3.b32 a, a, " + mask + ", 0xEA; lop3.b32 b, b, " + mask + ", 0xEA; "
        + "sub." + kind + " a, a, $5; sub." + kind + " b, b, $5; "
        + "mul." + kind + " $0, a, $3; mul." + kind + " $1, b, $3; }",
        "=&r,=&r,r,r,r,r,r",
        [words, scale, middle],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=2,
    )  # fmt: skip
    ROWS: gl.constexpr = words.shape[0]
    # [rows, threads, words, next column, 8 columns behind]
    parts = gl.join(near, behind).reshape([ROWS, 4, 4, 2, 2])
    return parts.permute([0, 2, 4, 1, 3]).reshape([ROWS, HALF]).to(dtype, bitcast=True)


@gluon.constexpr_function
def _of_sums(consumers, tokens):
    return gl.NVMMADistributedLayout([3, 0], [4 * consumers, 1], [16, tokens, 16])


@gluon.jit
def _zeros(CONSUMERS: gl.constexpr, TOKENS: gl.constexpr):
    return gl.zeros([CONSUMERS * SIDE, TOKENS], gl.float32, layout=_of_sums(CONSUMERS, TOKENS))


@gluon.jit
def _product(w, x, sums):
    """Begin to add products. A thread holds the same weights for every number of tokens."""
    of_weights: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(w, of_weights), x, sums, is_async=True)


@gluon.jit
def _products(w, x_smem, place, sums, BLOCK_T: gl.constexpr):
    """Begin to add the products of half a run with all pieces; wait for the previous half."""
    COUNT: gl.constexpr = _count(BLOCK_T)
    begun = ()
    for i in gl.static_range(COUNT):
        x = x_smem[i].index(place).permute((1, 0))
        begun += (_product(w, x, sums[i]),)  # type: ignore[assignment]
    return _wait(COUNT, begun, BLOCK_T)


@gluon.jit
def _wait(outstanding: gl.constexpr, sums, BLOCK_T: gl.constexpr):
    """Wait until at most `outstanding` products are not yet added."""
    if _count(BLOCK_T) == 1:
        added = (warpgroup_mma_wait(outstanding, deps=sums),)
    else:
        added = warpgroup_mma_wait(outstanding, deps=sums)
    return added


@gluon.jit
def _consume(
    row,
    token,
    first,
    last,
    shared_tile,
    part,
    parts,
    bias_ptr,
    out_ptr,
    partial_ptr,
    flags_ptr,
    tokens,
    features,
    x_smem,
    w_smem,
    p_smem,
    full,
    empty,
    CONSUMERS: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply the runs from `first` on, and store the tile or the sums of a part."""
    ROWS: gl.constexpr = CONSUMERS * SIDE
    sums = _multiply(
        first, last, x_smem, w_smem, p_smem, full, empty, CONSUMERS, BLOCK_T, STAGES
    )  # fmt: skip
    if PDL:
        gdc_wait()
    if SHARED:
        if shared_tile < 0:
            parts = 1
        others = shared_tile * (parts - 1)
        if part < parts - 1:
            _store_sums(sums, partial_ptr, others + part, CONSUMERS, BLOCK_T)
            _signal(_flag(flags_ptr, others + part, 4 * CONSUMERS))
        else:
            for other in range(others, others + parts - 1):
                _await(_flag(flags_ptr, other, 4 * CONSUMERS))
                sums = _add_sums(sums, partial_ptr, other, CONSUMERS, BLOCK_T)
            _store(
                sums, row, token, bias_ptr, out_ptr, tokens, features, ROWS, BLOCK_T, ADD, BIAS,
            )  # fmt: skip
    else:
        _store(
            sums, row, token, bias_ptr, out_ptr, tokens, features, ROWS, BLOCK_T, ADD, BIAS,
        )  # fmt: skip


@gluon.jit
def _multiply(
    first,
    last,
    x_smem,
    w_smem,
    p_smem,
    full,
    empty,
    CONSUMERS: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply the runs from `first` on; return the sums."""
    dtype: gl.constexpr = x_smem[0].dtype
    ROWS: gl.constexpr = CONSUMERS * SIDE
    sums = ()
    for i in gl.static_range(_count(BLOCK_T)):
        sums += (_zeros(CONSUMERS, _piece(BLOCK_T, i)),)  # type: ignore[assignment]
    stage = 0
    phase = 0
    gl.assume(first < last)  # else the assembler lets no instructions of the tensor cores overlap
    for run in range(first, last):
        mbarrier.wait(full.index(stage), phase)
        words, scale, middle = _words(w_smem, p_smem, stage, ROWS)
        w = _widened(words, scale, middle, dtype, False)
        sums = _products(w, x_smem, stage * 2, sums, BLOCK_T)
        mbarrier.arrive(empty.index(_previous(stage, STAGES)), pred=run > first)
        w = _widened(words, scale, middle, dtype, True)
        sums = _products(w, x_smem, stage * 2 + 1, sums, BLOCK_T)
        stage, phase = next_stage(stage, phase, STAGES)
    return _wait(0, sums, BLOCK_T)


@gluon.jit
def _previous(stage, STAGES: gl.constexpr):
    """Return the stage before `stage`.

    A loop cannot carry it as a variable that begins as `stage`: the compiler takes `held = stage`
    in the loop for no change, and uses the first stage in each run.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _sums_of(partial_ptr, part, CONSUMERS: gl.constexpr, BLOCK_T: gl.constexpr, i: gl.constexpr):
    """Return the addresses of the sums of a piece of a tile's part."""
    ROWS: gl.constexpr = CONSUMERS * SIDE
    TOKENS: gl.constexpr = _piece(BLOCK_T, i)
    of_sums: gl.constexpr = _of_sums(CONSUMERS, TOKENS)
    inner = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_sums))[:, None] * TOKENS
    inner += gl.arange(0, TOKENS, layout=gl.SliceLayout(0, of_sums))[None, :]
    return partial_ptr + (part * BLOCK_T + _before(BLOCK_T, i)) * ROWS + inner


@gluon.jit
def _store_sums(sums, partial_ptr, part, CONSUMERS: gl.constexpr, BLOCK_T: gl.constexpr):
    for i in gl.static_range(_count(BLOCK_T)):
        gl.store(_sums_of(partial_ptr, part, CONSUMERS, BLOCK_T, i), sums[i])


@gluon.jit
def _add_sums(sums, partial_ptr, part, CONSUMERS: gl.constexpr, BLOCK_T: gl.constexpr):
    added = ()
    for i in gl.static_range(_count(BLOCK_T)):
        others = gl.load(_sums_of(partial_ptr, part, CONSUMERS, BLOCK_T, i), volatile=True)
        added += (sums[i] + others,)  # type: ignore[assignment]
    return added


@gluon.jit
def _flag(flags_ptr, part, WARPS: gl.constexpr):
    """Return the address of a part's flag of this warp, for each thread."""
    of_flags: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return flags_ptr + part * WARPS + gl.arange(0, 32 * WARPS, layout=of_flags) // 32


@gluon.jit
def _signal(flag):
    """Set the flag of this warp. All programs see the warp's earlier stores before the flag."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; "
        "setp.eq.u32 p, lane, 0; @p red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l",
        [flag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _await(flag):
    """Wait for the flag that the same warp of another program sets, and reset it."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane, seen; "
        "again: ld.acquire.gpu.global.b32 seen, [$1]; setp.eq.u32 p, seen, 0; @p bra again; "
        "bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        "@p st.relaxed.gpu.global.b32 [$1], 0; mov.b32 $0, 0; }",
        "=r,l",
        [flag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _store(
    sums,
    row,
    token,
    bias_ptr,
    out_ptr,
    tokens,
    features,
    ROWS: gl.constexpr,
    BLOCK_T: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Store a tile of outputs: BIAS adds the bias, ADD adds the values stored before."""
    for i in gl.static_range(_count(BLOCK_T)):
        _store_piece(
            sums[i], row, token + _before(BLOCK_T, i), bias_ptr, out_ptr, tokens, features, ROWS,
            _piece(BLOCK_T, i), ADD, BIAS,
        )  # fmt: skip


@gluon.jit
def _store_piece(
    sums,
    row,
    token,
    bias_ptr,
    out_ptr,
    tokens,
    features,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
):
    of_sums: gl.constexpr = sums.type.layout
    of_store: gl.constexpr = _of_store(ROWS, TOKENS)
    if BIAS:
        feature = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_sums))
        bias = gl.load(bias_ptr + feature, mask=feature < features, other=0.0)
        sums += bias.to(gl.float32)[:, None]
    result = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), of_store)
    feature = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_store))
    place = token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, of_store))
    out = out_ptr + (place.to(gl.int64) * features)[None, :] + feature[:, None]
    mask = (feature < features)[:, None] & (place < tokens)[None, :]
    if ADD:
        residual = gl.load(out, mask=mask, other=0.0)
        summed = result.to(gl.float32) + residual.to(gl.float32)
        result = summed.to(out_ptr.dtype.element_ty)
    gl.store(out, result, mask=mask)
