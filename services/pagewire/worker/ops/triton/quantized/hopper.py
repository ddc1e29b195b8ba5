"""The GEMM of FP8 weights and inputs for many tokens on Hopper, written in Gluon.

A program has a loader, which is one warp, and consumers, which are warp groups of four warps. The
loader copies tiles of inputs and weights to shared memory by TMA. A consumer owns 64 or 128 tokens
and 128 features of the output tile. It multiplies 64 tokens at a time, and adds the sums of 128
products in float32, because Hopper's tensor cores keep fewer bits. While one consumer adds, another
one multiplies; nothing synchronizes them.

Inputs are copied in boxes, because rows past the end are slow. Boxes without tokens are not copied,
and 64 tokens that do not exist are not multiplied.

Programs are persistent, one on each multiprocessor. The loader works ahead into the next tile while
the consumers store. It copies the first weights while the inputs may still be computed.

Where the last round of programs would leave multiprocessors idle, several programs share the
columns of a tile, in parts. Each stores its sums and waits for the others. Then it adds up the sums
of some of the tokens, always in the order of the columns. A tile that is not shared has sums in the
order of `scaled`, and the same bits.
"""

from __future__ import annotations

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

from pagewire.worker.ops.contract.quantized import QuantizedInput, ScaledWeight
from pagewire.worker.ops.device import dependent_launch, multiprocessors
from pagewire.worker.ops.triton.quantized import choices
from pagewire.worker.ops.triton.quantized.choices import Choice, divide, is_shareable
from pagewire.worker.ops.triton.quantized.exchange import shared_sums
from pagewire.worker.ops.triton.streamed.scaled import suits_hopper

BLOCK_K = gl.constexpr(choices.BLOCK_K)
HALF = gl.constexpr(choices.HALF)
SIDE = gl.constexpr(choices.SIDE)
MAX_PARTS = gl.constexpr(choices.MAX_PARTS)
# Tiles of tokens whose programs run at once, so that they read the same weights from the L2 cache.
GROUP = gl.constexpr(16)
PIECE = gl.constexpr(16)  # tokens whose sums a warp group adds up at once
# Registers of a thread with two consumers, and with three.
CONSUMER_REGISTERS = gl.constexpr((232, 160))
LOADER_REGISTERS = gl.constexpr((40, 32))


def is_supported(x: QuantizedInput, weight: ScaledWeight) -> bool:
    """Tell whether `multiply` can compute this product."""
    return suits_hopper(weight, x.dtype)


def choose(
    x: QuantizedInput, weight: ScaledWeight, *, gated: bool = False, shared: bool = True
) -> Choice:
    """Choose the fastest kernel for this product, as `choices.choose`."""
    if not is_supported(x, weight):
        return choices.PLAIN
    processors = multiprocessors(x.values.device)
    return choices.choose(x.values.shape[0], *weight.shape, processors, gated, shared)


def multiply(
    x: QuantizedInput,
    weight: ScaledWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    add: bool = False,
    gated: bool = False,
    choice: Choice,
) -> None:
    """Store `x @ weight.T + bias` in `out`, with `gated` its `silu_mul`; with `add`, add the
    product to `out`."""
    (tokens, k), rows = x.values.shape, weight.shape[0]
    device = x.values.device
    processors, shape = multiprocessors(device), choice.shape
    assert shape is not None
    assert is_shareable(shape, choice.parts, tokens, rows, k, processors)
    work = divide(shape, choice.parts, tokens, rows, processors)
    sums, flags = (x.scales, x.scales) if choice.parts == 1 else shared_sums(device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    pdl = dependent_launch(device)
    launch = {"launch_pdl": True} if pdl else {}
    scaled_hopper_kernel[(work.programs,)](
        TensorDescriptor.from_tensor(x.values, [shape.box, BLOCK_K.value], layout),
        TensorDescriptor.from_tensor(
            weight.values, [SIDE.value // 2 if gated else SIDE.value, BLOCK_K.value], layout
        ),
        x.scales,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        sums,
        flags,
        tokens,
        out.shape[1],
        k,
        x.scales.stride(0),
        work.whole,
        (work.tiles - work.whole) * choice.parts,
        choice.parts,
        CONSUMERS=shape.consumers,
        HALVES=shape.halves,
        BESIDE=shape.beside,
        STAGES=shape.stages,
        SHARED=choice.parts > 1,
        ADD=add,
        BIAS=bias is not None,
        GATED=gated,
        PDL=pdl,
        num_warps=4,
        **launch,
    )


@gluon.jit(do_not_specialize=["tokens", "x_scales_stride", "whole", "sharers", "parts"])
def scaled_hopper_kernel(
    x_tiles,  # descriptor of [tokens, K]
    weight_tiles,  # descriptor of [features, K]
    x_scales_ptr,  # [tokens, 1]
    weight_scales_ptr,  # [features, 1]
    bias_ptr,  # [features]
    out_ptr,  # [tokens, features]
    sums_ptr,  # the sums of a tile of each program, if SHARED
    flags_ptr,  # two counters of each consumer of a shared tile
    tokens,
    features,
    K,
    x_scales_stride,
    whole,  # tiles that are not shared
    sharers,  # programs that share the others
    parts,  # programs that share a tile
    CONSUMERS: gl.constexpr,
    HALVES: gl.constexpr,
    BESIDE: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply tiles; a consumer has HALVES times 64 tokens, by 128 features.

    With BESIDE the consumers share the tokens of a tile, else its features. Each program computes
    the tile of its number, and then every further one at a distance of the grid's size. With SHARED
    the first `sharers` programs then compute the remaining tiles: `parts` neighbours share the
    columns of each. They wait for each other, so the grid is at most `[multiprocessors]`.

    The next kernel may start at once: kernels that quantize, and RoPE after them, read nothing
    before they wait.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_tiles.dtype
    tiled: gl.constexpr = x_tiles.layout
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    # Sizes of a tensor are powers of two, which those of a tile need not be.
    LINES: gl.constexpr = HALVES * (1 if BESIDE else CONSUMERS)
    SIDES: gl.constexpr = CONSUMERS if BESIDE else 1
    BOX: gl.constexpr = x_tiles.block_shape[0]
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * LINES * HALF // BOX, BOX, BLOCK_K], tiled)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * SIDES, SIDE, BLOCK_K], tiled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    0, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, sums_ptr, flags_ptr,
                    tokens, features, K, x_scales_stride, whole, sharers, parts, x_smem, w_smem,
                    full, empty, CONSUMERS, HALVES, BESIDE, STAGES, SHARED, ADD, BIAS,
                    GATED, PDL,
                )),
                (_consume, (
                    1, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, sums_ptr, flags_ptr,
                    tokens, features, K, x_scales_stride, whole, sharers, parts, x_smem, w_smem,
                    full, empty, CONSUMERS, HALVES, BESIDE, STAGES, SHARED, ADD, BIAS,
                    GATED, PDL,
                )),
                (_load, (
                    x_tiles, weight_tiles, tokens, features, K, whole, sharers, parts, x_smem,
                    w_smem, full, empty, CONSUMERS, HALVES, BESIDE, STAGES, SHARED, GATED,
                    PDL,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS[0], LOADER_REGISTERS[0]],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    0, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, sums_ptr, flags_ptr,
                    tokens, features, K, x_scales_stride, whole, sharers, parts, x_smem, w_smem,
                    full, empty, CONSUMERS, HALVES, BESIDE, STAGES, SHARED, ADD, BIAS,
                    GATED, PDL,
                )),
                (_consume, (
                    1, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, sums_ptr, flags_ptr,
                    tokens, features, K, x_scales_stride, whole, sharers, parts, x_smem, w_smem,
                    full, empty, CONSUMERS, HALVES, BESIDE, STAGES, SHARED, ADD, BIAS,
                    GATED, PDL,
                )),
                (_consume, (
                    2, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, sums_ptr, flags_ptr,
                    tokens, features, K, x_scales_stride, whole, sharers, parts, x_smem, w_smem,
                    full, empty, CONSUMERS, HALVES, BESIDE, STAGES, SHARED, ADD, BIAS,
                    GATED, PDL,
                )),
                (_load, (
                    x_tiles, weight_tiles, tokens, features, K, whole, sharers, parts, x_smem,
                    w_smem, full, empty, CONSUMERS, HALVES, BESIDE, STAGES, SHARED, GATED,
                    PDL,
                )),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS[1], CONSUMER_REGISTERS[1], LOADER_REGISTERS[1]],
        )  # fmt: skip


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the stage after `stage`, and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _place(tile, token_tiles, feature_tiles):
    """Return the place of a tile: groups of GROUP tiles of tokens, then features, then tokens.

    The tiles of the last tokens may be less work. The order of the tokens turns in each round, so
    that they do not all belong to the same programs.
    """
    a_group = GROUP * feature_tiles
    first = tile // a_group * GROUP
    height = gl.minimum(token_tiles - first, GROUP)
    within = tile % a_group
    feature = within // height
    turn = feature * height // gl.num_programs(0)
    return first + (within + turn) % height, feature


@gluon.jit
def _count(whole, sharers):
    """Return the number of tiles that only this program computes, and of all its tiles."""
    program = gl.program_id(0)
    own = (whole - program + gl.num_programs(0) - 1) // gl.num_programs(0)
    return own, own + gl.where(program < sharers, 1, 0)


@gluon.jit
def _item(item, own, blocks, whole, parts, SHARED: gl.constexpr):
    """Return the tile number `item` of this program, and its part of the tile's columns."""
    program = gl.program_id(0)
    tile = program + item * gl.num_programs(0)
    first = 0
    last = blocks
    if SHARED:
        is_shared = item >= own
        part = program % parts
        tile = gl.where(is_shared, whole + program // parts, tile)
        first = gl.where(is_shared, part * blocks // parts, 0)
        last = gl.where(is_shared, (part + 1) * blocks // parts, blocks)
    return tile, first, last


@gluon.jit
def _load(
    x_tiles,
    weight_tiles,
    tokens,
    features,
    K,
    whole,
    sharers,
    parts,
    x_smem,
    w_smem,
    full,
    empty,
    CONSUMERS: gl.constexpr,
    HALVES: gl.constexpr,
    BESIDE: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Load the tiles; the first weights load while inputs may still be computed."""
    ROWS: gl.constexpr = HALVES * HALF * (1 if BESIDE else CONSUMERS)
    COLUMNS: gl.constexpr = SIDE * (CONSUMERS if BESIDE else 1)
    OUTPUTS: gl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    BOX: gl.constexpr = x_tiles.block_shape[0]
    token_tiles = gl.cdiv(tokens, ROWS)
    feature_tiles = gl.cdiv(features, OUTPUTS)
    blocks = K // BLOCK_K
    own, count = _count(whole, sharers)
    tile, first, last = _item(0, own, blocks, whole, parts, SHARED)
    row, column = _place(tile, token_tiles, feature_tiles)
    boxes = gl.minimum(gl.cdiv(tokens - row * ROWS, BOX), ROWS // BOX)
    ahead = gl.minimum(last - first, STAGES)
    for early in range(ahead):
        _expect(full, early, boxes, ROWS, COLUMNS, BOX)
        _load_weights(
            weight_tiles, column, first + early, features, w_smem, full, early, COLUMNS, GATED
        )
    if PDL:
        gdc_wait()
    for early in range(ahead):
        _load_inputs(x_tiles, row * ROWS, first + early, x_smem, full, early, boxes, ROWS, BOX)
    stage = gl.where(ahead == STAGES, 0, ahead)
    phase = gl.where(ahead == STAGES, 0, 1)
    for item in range(count):
        tile, first, last = _item(item, own, blocks, whole, parts, SHARED)
        row, column = _place(tile, token_tiles, feature_tiles)
        boxes = gl.minimum(gl.cdiv(tokens - row * ROWS, BOX), ROWS // BOX)
        for block in range(first + gl.where(item == 0, ahead, 0), last):
            mbarrier.wait(empty.index(stage), phase)
            _expect(full, stage, boxes, ROWS, COLUMNS, BOX)
            _load_weights(
                weight_tiles, column, block, features, w_smem, full, stage, COLUMNS, GATED
            )
            _load_inputs(x_tiles, row * ROWS, block, x_smem, full, stage, boxes, ROWS, BOX)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _expect(
    full,
    stage,
    boxes,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    BOX: gl.constexpr,
):
    """Let a stage expect the bytes of a block; their number must be known to the compiler."""
    for held in gl.static_range(1, ROWS // BOX + 1):
        mbarrier.expect(full.index(stage), (held * BOX + COLUMNS) * BLOCK_K, pred=boxes == held)


@gluon.jit
def _load_weights(
    weight_tiles,
    column,
    block,
    features,
    w_smem,
    full,
    stage,
    COLUMNS: gl.constexpr,
    GATED: gl.constexpr,
):
    """Load 128 columns of the weights; with GATED, for each consumer 64 gates and the 64 values
    that belong to them."""
    PART: gl.constexpr = weight_tiles.block_shape[0]
    for part in gl.static_range(COLUMNS // PART):
        if GATED:
            first = column * (COLUMNS // 2) + part // 2 * PART + part % 2 * features
        else:
            first = column * COLUMNS + part * PART
        tma.async_copy_global_to_shared(
            weight_tiles,
            [first, block * BLOCK_K],
            full.index(stage),
            w_smem.index(stage * (COLUMNS // SIDE) + part * PART // SIDE).slice(
                part * PART % SIDE, PART
            ),
        )


@gluon.jit
def _load_inputs(
    x_tiles,
    token,
    block,
    x_smem,
    full,
    stage,
    boxes,
    ROWS: gl.constexpr,
    BOX: gl.constexpr,
):
    """Load 128 columns of the inputs, only the boxes that hold tokens."""
    for i in range(boxes):
        tma.async_copy_global_to_shared(
            x_tiles,
            [token + i * BOX, block * BLOCK_K],
            full.index(stage),
            x_smem.index(stage * (ROWS // BOX) + i),
        )


@gluon.jit
def _consume(
    consumer: gl.constexpr,
    x_scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    flags_ptr,
    tokens,
    features,
    K,
    x_scales_stride,
    whole,
    sharers,
    parts,
    x_smem,
    w_smem,
    full,
    empty,
    CONSUMERS: gl.constexpr,
    HALVES: gl.constexpr,
    BESIDE: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply a consumer's part of each tile, and store it."""
    ROWS: gl.constexpr = HALVES * HALF * (1 if BESIDE else CONSUMERS)
    COLUMNS: gl.constexpr = SIDE * (CONSUMERS if BESIDE else 1)
    OUTPUTS: gl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    first_row: gl.constexpr = 0 if BESIDE else consumer * HALVES * HALF
    first_column: gl.constexpr = consumer * SIDE if BESIDE else 0
    # Of the sums of a program's tile, those of this consumer.
    AREA: gl.constexpr = HALVES * HALF * SIDE
    if PDL:
        gdc_wait()
    token_tiles = gl.cdiv(tokens, ROWS)
    feature_tiles = gl.cdiv(features, OUTPUTS)
    blocks = K // BLOCK_K
    own, count = _count(whole, sharers)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for item in range(count):
        tile, first, last = _item(item, own, blocks, whole, parts, SHARED)
        row, column = _place(tile, token_tiles, feature_tiles)
        first_token = row * ROWS + first_row
        first_feature = column * OUTPUTS + first_column // (2 if GATED else 1)
        if first_token + (HALVES - 1) * HALF < tokens:
            upper, lower, stage, phase = _sum(
                first, last, stage, phase, x_smem, w_smem, full, empty, first_row // HALF,
                first_column // SIDE, ROWS // HALF, COLUMNS // SIDE, HALVES, STAGES,
            )  # fmt: skip
        elif first_token < tokens:
            upper, lower, stage, phase = _sum(
                first, last, stage, phase, x_smem, w_smem, full, empty, first_row // HALF,
                first_column // SIDE, ROWS // HALF, COLUMNS // SIDE, HALVES - 1, STAGES,
            )  # fmt: skip
        else:
            upper, lower, stage, phase = _sum(
                first, last, stage, phase, x_smem, w_smem, full, empty, first_row // HALF,
                first_column // SIDE, ROWS // HALF, COLUMNS // SIDE, 0, STAGES,
            )  # fmt: skip
        is_whole = last - first == blocks
        if SHARED:
            sums = sums_ptr + (gl.program_id(0) * CONSUMERS + consumer) * AREA
        for half in gl.static_range(HALVES):
            if first_token + half * HALF < tokens:
                part = lower if half else upper
                if is_whole:
                    _store(
                        part, first_token + half * HALF, first_feature, x_scales_ptr,
                        weight_scales_ptr, bias_ptr, out_ptr, tokens, features, x_scales_stride,
                        ADD, BIAS, GATED,
                    )  # fmt: skip
                if SHARED:  # noqa: SIM102 (known to the compiler)
                    if not is_whole:
                        _store_sums(part, sums + half * HALF * SIDE)
        if SHARED:  # noqa: SIM102
            if (not is_whole) & (first_token < tokens):
                _signal(_flags(flags_ptr, tile - whole, consumer, CONSUMERS))
    if SHARED:  # noqa: SIM102 (known to the compiler)
        if gl.program_id(0) < sharers:
            part = gl.program_id(0) % parts
            at = gl.program_id(0) // parts
            row, column = _place(whole + at, token_tiles, feature_tiles)
            first_token = row * ROWS + first_row
            if first_token < tokens:
                held = gl.minimum(tokens - first_token, HALVES * HALF)
                pieces = gl.cdiv(held, PIECE)
                flags = _flags(flags_ptr, at, consumer, CONSUMERS)
                _await(flags, 4 * parts)
                sums = sums_ptr + (at * parts * CONSUMERS + consumer) * AREA
                for piece in range(part * pieces // parts, (part + 1) * pieces // parts):
                    _fold(
                        sums + piece * PIECE * SIDE, CONSUMERS * AREA, parts,
                        first_token + piece * PIECE,
                        column * OUTPUTS + first_column // (2 if GATED else 1), x_scales_ptr,
                        weight_scales_ptr, bias_ptr, out_ptr, tokens, features, x_scales_stride,
                        ADD, BIAS, GATED,
                    )  # fmt: skip
                _depart(flags, 4 * parts)


@gluon.jit
def _sum(
    first,
    last,
    stage,
    phase,
    x_smem,
    w_smem,
    full,
    empty,
    first_line: gl.constexpr,
    side: gl.constexpr,
    LINES: gl.constexpr,
    SIDES: gl.constexpr,
    COUNT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Add up the products of COUNT times 64 tokens; with 0, only free the stages."""
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 32])
    none = gl.zeros([HALF, SIDE], gl.float32, layout=of_sums)
    upper = gl.zeros([HALF, SIDE], gl.float32, layout=of_sums)
    lower = gl.zeros([HALF, SIDE], gl.float32, layout=of_sums)
    for _ in range(first, last):
        mbarrier.wait(full.index(stage), phase)
        if COUNT > 0:
            w = w_smem.index(stage * SIDES + side).permute((1, 0))
            part = warpgroup_mma(
                _line(x_smem, stage * LINES + first_line), w, none,
                use_acc=False, is_async=True, max_num_imprecise_acc=BLOCK_K,
            )  # fmt: skip
            part = warpgroup_mma_wait(0, deps=(part,))
            if COUNT == 1:
                mbarrier.arrive(empty.index(stage))
            upper += part
            if COUNT == 2:
                part = warpgroup_mma(
                    _line(x_smem, stage * LINES + first_line + 1), w, none,
                    use_acc=False, is_async=True, max_num_imprecise_acc=BLOCK_K,
                )  # fmt: skip
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(stage))
                lower += part
        else:
            mbarrier.arrive(empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    return upper, lower, stage, phase


@gluon.jit
def _line(x_smem, line):
    """Return 64 tokens of the inputs, whose boxes follow each other."""
    BOX: gl.constexpr = x_smem.shape[1]
    boxes = x_smem.index(line * (HALF // BOX))
    return boxes._reinterpret(x_smem.dtype, [HALF, BLOCK_K], x_smem.layout)


@gluon.jit
def _store_sums(sums, to):
    """Store the sums of 64 tokens for the other programs of the tile."""
    layout: gl.constexpr = sums.type.layout
    token = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, SIDE, layout=gl.SliceLayout(0, layout))
    gl.store(to + token[:, None] * SIDE + row[None, :], sums)


@gluon.jit
def _flags(flags_ptr, at, consumer: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return the addresses of the counters of a shared tile, the same in every thread."""
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return flags_ptr + (at * CONSUMERS + consumer) * 2 + thread * 0


@gluon.jit
def _signal(flags):
    """Count this warp. All programs see the warp's earlier stores before the count."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; "
        "setp.eq.u32 p, lane, 0; @p red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l",
        [flags],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _await(flags, warps):
    """Wait until `warps` warps are counted."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 seen; "
        "again: ld.acquire.gpu.global.b32 seen, [$1]; setp.lt.u32 p, seen, $2; @p bra again; "
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0; }",
        "=r,l,r",
        [flags, warps],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _depart(flags, warps):
    """Count this warp as done with the tile. The last of `warps` warps resets both counters."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .b32 lane, before, last; bar.warp.sync 0xffffffff; "
        "mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.b32 before, 0; sub.u32 last, $2, 1; "
        "@p atom.acq_rel.gpu.global.add.u32 before, [$1+4], 1; "
        "setp.eq.and.u32 q, before, last, p; "
        "@q st.relaxed.gpu.global.b32 [$1], 0; @q st.relaxed.gpu.global.b32 [$1+4], 0; "
        "mov.b32 $0, 0; }",
        "=r,l,r",
        [flags, warps],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fold(
    sums_ptr,
    stride,
    parts,
    first_token,
    first_feature,
    x_scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    features,
    x_scales_stride,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
):
    """Add up the sums of PIECE tokens of all parts of a tile, and store the products.

    The sums of a part begin `stride` values after those of the part before it.
    """
    OUTPUTS: gl.constexpr = SIDE // 2 if GATED else SIDE
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]] if GATED else [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
        if GATED
        else [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]],
        [[4, 0], [8, 0]] if GATED else [[2, 0], [4, 0]],
        [],
        [PIECE, OUTPUTS],
    )
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    place = gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
    output = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, layout))
    inner = place[:, None] * SIDE + output[None, :]
    first = gl.zeros([PIECE, OUTPUTS], gl.float32, layout=layout)
    second = gl.zeros([PIECE, OUTPUTS], gl.float32, layout=layout)
    for other in gl.static_range(MAX_PARTS):
        from_ptr = sums_ptr + other * stride + inner
        mask = (inner >= 0) & (other < parts)
        first += gl.load(from_ptr, mask=mask, other=0.0, volatile=True)
        if GATED:
            second += gl.load(from_ptr + OUTPUTS, mask=mask, other=0.0, volatile=True)
    token = first_token + place
    feature = first_feature + output
    held = feature < features
    x_scale = gl.load(x_scales_ptr + token * x_scales_stride, mask=token < tokens, other=0.0)
    first = _scaled(first, x_scale, feature, held, weight_scales_ptr, bias_ptr, BIAS)
    if GATED:
        second = _scaled(
            second, x_scale, feature + features, held, weight_scales_ptr, bias_ptr, BIAS
        )
        first = _silu(_rounded(first, dtype)) * _rounded(second, dtype)
    _write(first.to(dtype), token, feature, out_ptr, tokens, features, ADD)


@gluon.jit
def _scaled(sums, x_scale, row, held, weight_scales_ptr, bias_ptr, BIAS: gl.constexpr):
    """Return the sums with their scales and the bias; `row` are rows of the weight."""
    sums *= x_scale[:, None] * gl.load(weight_scales_ptr + row, mask=held, other=0.0)[None, :]
    if BIAS:
        sums += gl.load(bias_ptr + row, mask=held, other=0.0).to(gl.float32)[None, :]
    return sums


@gluon.jit
def _rounded(x, dtype: gl.constexpr):
    """Return float32 values rounded to `dtype`, as float32; see `rowwise.quantize.widened`."""
    if dtype != gl.bfloat16:
        return x.to(dtype).to(gl.float32)
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=r,=r,r",
        [x.to(dtype)],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _silu(x):
    """Return `x / (1 + exp(-x))`, with the bits of `rowwise.activation.silu_of` from -87 on.

    The general exponential and division scale what is tiny or huge, which costs as much again.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 y; mul.rn.f32 y, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 y, y; "
        "add.rn.f32 y, y, 0f3F800000; rcp.approx.ftz.f32 y, y; mul.rn.f32 $0, $1, y; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _write(result, token, feature, out_ptr, tokens, features, ADD: gl.constexpr):
    """Store results, or add them to the values stored before."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    out = out_ptr + (token.to(gl.int64) * features)[:, None] + feature[None, :]
    mask = (token < tokens)[:, None] & (feature < features)[None, :]
    if ADD:
        residual = gl.load(out, mask=mask, other=0.0)
        summed = result.to(gl.float32) + residual.to(gl.float32)
        result = summed.to(dtype)
    gl.store(out, result, mask=mask)


@gluon.jit
def _store(
    sums,
    first_token,
    first_feature,
    x_scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    features,
    x_scales_stride,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
):
    """Scale the sums of 64 tokens by 128 weight rows and store them.

    With GATED, the first 64 rows are gates, and the others the values that belong to them.
    """
    OUTPUTS: gl.constexpr = SIDE // 2 if GATED else SIDE
    # A thread holds eight features of a token, which is a store of 16 bytes.
    of_store: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]]
        if GATED
        else [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [HALF, OUTPUTS],
    )
    of_sums: gl.constexpr = sums.type.layout
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    token = first_token + gl.arange(0, HALF, layout=gl.SliceLayout(1, of_sums))
    x_scale = gl.load(x_scales_ptr + token * x_scales_stride, mask=token < tokens, other=0.0)
    row = gl.arange(0, SIDE, layout=gl.SliceLayout(0, of_sums))
    feature = first_feature + row % OUTPUTS
    held = feature < features
    if GATED:
        row = feature + row // OUTPUTS * features
    else:
        row = feature
    sums = _scaled(sums, x_scale, row, held, weight_scales_ptr, bias_ptr, BIAS)
    if GATED:
        halves = gl.reshape(_rounded(sums, dtype), [HALF, 2, OUTPUTS])
        gate, up = gl.split(gl.permute(halves, (0, 2, 1)))
        sums = _silu(gate) * up
    result = gl.convert_layout(sums.to(dtype), of_store)
    token = first_token + gl.arange(0, HALF, layout=gl.SliceLayout(1, of_store))
    feature = first_feature + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, of_store))
    _write(result, token, feature, out_ptr, tokens, features, ADD)
