"""Products of arranged weights in four bits with one token on Hopper, written in Gluon.

A warp multiplies 16 rows by the token with tensor cores. Two instructions make the numbers of two
columns from a word, and nothing is subtracted or scaled before the sum of a run. Afterwards `magic`
and the zero point are subtracted, times the sum of the run's inputs.

The warps of a program share the columns, one run each in turn. They load their first weights while
the kernel that computes the input may still run. Inputs go to shared memory in the order of
threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.quantized import RUN, GroupedWeight
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.quantized.fragments import BLOCK

COLUMNS = gl.constexpr(RUN)
HEIGHT = gl.constexpr(16)  # weight rows of a matrix instruction
SIDE = gl.constexpr(BLOCK)
WORDS = gl.constexpr(RUN // 8)  # of a run of a row, 32 bits each


def _multiplied(dtype: str) -> str:
    """Assembly that adds a run of 16 rows to their sums, with scales and zero points of a group.

    Operands: four new sums; words of the rows `g` and `g + 8`, four each; inputs in 16 registers,
    where `8 far + 2 t + near` has the columns `64 far + 16 t + 8 near` and the next one of thread
    0; sums of inputs; pairs of both rows, four times the same; four sums.
    """
    mask = "0x000F000F, 0x43004300" if dtype == "bf16" else "0x00F000F0, 0x54005400"
    lowest = 0 if dtype == "bf16" else 4
    lines = ["{ .reg .b32 a0, a1, a2, a3; .reg .f32 s0, s1, s2, s3, c, m; .reg .b16 lo, hi;"]
    lines += [f"mov.b32 s{i}, 0;" for i in range(4)]
    for t in range(4):
        for far in range(2):
            for i in range(4):
                word, shift = 4 + 4 * (i % 2) + t, 4 * far + 8 * (i // 2) - lowest
                lines.append(f"sh{'l' if shift < 0 else 'r'}.b32 a{i}, ${word}, {abs(shift)};")
                lines.append(f"lop3.b32 a{i}, a{i}, {mask}, 0xEA;")
            lines.append(_mma(dtype, 12 + 8 * far + 2 * t))
    for row in range(2):
        pair = 32 + 4 * row
        if dtype == "bf16":
            lines.append(f"shl.b32 c, ${pair}, 16; and.b32 m, ${pair}, 0xFFFF0000;")
        else:
            lines.append(f"mov.b32 {{lo, hi}}, ${pair}; cvt.f32.f16 c, lo; cvt.f32.f16 m, hi;")
        lines.append("neg.f32 m, m;")
        for column in range(2):
            i = 2 * row + column
            lines.append(f"fma.rn.f32 s{i}, m, ${28 + column}, s{i};")
            lines.append(f"fma.rn.f32 ${i}, c, s{i}, ${40 + i};")
    return " ".join([*lines, "}"])


def _summed(dtype: str) -> str:
    """Assembly that adds up the inputs of a run: a product with ones."""
    one = "0x3F803F80" if dtype == "bf16" else "0x3C003C00"
    lines = ["{ .reg .b32 a0, a1, a2, a3; .reg .f32 s0, s1, s2, s3;"]
    lines += [f"mov.b32 s{i}, 0; mov.b32 a{i}, {one};" for i in range(4)]
    lines += [_mma(dtype, 4 + 2 * i) for i in range(8)]
    lines += [f"mov.b32 ${i}, s{i};" for i in range(4)]
    return " ".join([*lines, "}"])


def _mma(dtype: str, inputs: int) -> str:
    """Assembly that adds a product with two registers of inputs to `s0` to `s3`."""
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{s0, s1, s2, s3}}, "
        f"{{a0, a1, a2, a3}}, {{${inputs}, ${inputs + 1}}}, {{s0, s1, s2, s3}};"
    )


MULTIPLIED_BF16 = gl.constexpr(_multiplied("bf16"))
MULTIPLIED_F16 = gl.constexpr(_multiplied("f16"))
OF_MULTIPLIED = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 24 + ["f"] * 4 + ["r"] * 8 + ["f"] * 4))
SUMMED_BF16 = gl.constexpr(_summed("bf16"))
SUMMED_F16 = gl.constexpr(_summed("f16"))
OF_SUMMED = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 16))


@dataclass(frozen=True, slots=True)
class Plan:
    """A program has `warps` warps. Each loads `ahead` runs ahead; a thread has `registers`."""

    warps: int
    ahead: int
    registers: int


def choose_plan(k: int) -> Plan:
    """Choose the plan for `k` columns; timed on an H100."""
    return Plan(4, 8, 128) if k <= 8192 else Plan(8, 4, 128)


@gluon.constexpr_function
def _of_threads(warps):
    """Four values of a thread: `[warps, 8 groups, 4 threads, 4]`."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[2**i, 0, 0, 0] for i in range(warps.bit_length() - 1)],
        [],
        [warps, 8, 4, 4],
    )


@gluon.constexpr_function
def _of_inputs(warps):
    """Sixteen values of a thread: `[1, 2, 2, warps, 4 threads, 4]`; all groups have the same."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2], [0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]],
        [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0], [0] * 6, [0] * 6, [0] * 6],
        [[0, 0, 0, 2**i, 0, 0] for i in range(warps.bit_length() - 1)],
        [],
        [1, 2, 2, warps, 4, 4],
    )


def multiply(
    x: Tensor,
    weight: GroupedWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    add: bool = False,
    plan: Plan | None = None,
) -> None:
    """Store `x @ weight.T + bias` of one token in `out`; with `add`, add it to `out`.

    The weight is arranged and its `order` ignored.
    """
    assert weight.pairs is not None
    features, k = weight.shape
    if x.stride(1) != 1 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    plan = plan or choose_plan(k)
    pdl = dependent_launch(x.device)
    launch = {"launch_pdl": True} if pdl else {}
    fragment_vector_kernel[(cdiv(features, HEIGHT.value),)](
        x.view(torch.int32),
        weight.values.view(torch.int32),
        weight.pairs,
        weight.pairs if bias is None else bias,
        out,
        features,
        K=k,
        GROUP=weight.group,
        WARPS=plan.warps,
        AHEAD=plan.ahead,
        ROUNDS=next_power_of_2(cdiv(k // RUN, plan.warps)),
        BF16=x.dtype == torch.bfloat16,
        ADD=add,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=plan.warps,
        maxnreg=plan.registers,
        **launch,
    )


@gluon.jit
def _weights(
    words,
    pairs,
    first,
    step: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Load the words and pairs of two rows of a run of each warp; the run may be past the last."""
    RUNS: gl.constexpr = K // COLUMNS
    run = gl.minimum(first + step * WARPS, RUNS - 1)
    pair = pairs + (run * COLUMNS // GROUP * SIDE)[:, None]
    near = words + step * WARPS * (SIDE * WORDS)
    far = near + 8 * WORDS
    if (step + 1) * WARPS <= RUNS:
        return (
            gl.load(near, eviction_policy="evict_first"),
            gl.load(far, eviction_policy="evict_first"),
            gl.load(pair),
            gl.load(pair + 8),
        )
    else:
        here = (first + step * WARPS < RUNS)[:, None, None, None]
        return (
            gl.load(near, mask=here, other=0, eviction_policy="evict_first"),
            gl.load(far, mask=here, other=0, eviction_policy="evict_first"),
            gl.load(pair),
            gl.load(pair + 8),
        )


@gluon.jit
def fragment_vector_kernel(
    x_ptr,  # [K / 2], two inputs each
    words_ptr,  # [blocks, runs, SIDE, WORDS], eight columns each
    pairs_ptr,  # [blocks, groups, SIDE]
    bias_ptr,  # [features]
    out_ptr,  # [features]
    features,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    WARPS: gl.constexpr,
    AHEAD: gl.constexpr,
    ROUNDS: gl.constexpr,
    BF16: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply 16 rows. The grid is `[features / 16]`; ROUNDS is a power of two."""
    of_threads: gl.constexpr = _of_threads(WARPS)
    of_sixteen: gl.constexpr = _of_inputs(WARPS)
    of_rows: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, of_threads))  # [warps, 8]
    of_warp: gl.constexpr = gl.SliceLayout(1, of_rows)
    of_group: gl.constexpr = gl.SliceLayout(0, of_rows)
    of_quad: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, of_threads)))
    of_four: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, of_threads)))
    of_inputs: gl.constexpr = gl.SliceLayout(1, of_threads)
    RUNS: gl.constexpr = K // COLUMNS
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    STEPS: gl.constexpr = (RUNS + WARPS - 1) // WARPS
    MULTIPLIED: gl.constexpr = MULTIPLIED_BF16 if BF16 else MULTIPLIED_F16
    SUMMED: gl.constexpr = SUMMED_BF16 if BF16 else SUMMED_F16
    if PDL:
        gdc_launch_dependents()
    first = gl.arange(0, WARPS, layout=of_warp)  # the first run of each warp
    group = gl.arange(0, 8, layout=of_group)
    quad = gl.arange(0, 4, layout=of_quad)[None, None, :, None]
    four = gl.arange(0, 4, layout=of_four)[None, None, None, :]
    row = gl.program_id(0) * HEIGHT
    block = row // SIDE
    begin = words_ptr + block.to(gl.int64) * (RUNS * SIDE * WORDS) + row % SIDE * WORDS
    words = begin + (first[:, None] * (SIDE * WORDS) + group[None, :] * WORDS)[:, :, None, None]
    words += quad * 4 + four
    pairs = pairs_ptr + block * (GROUPS * SIDE) + row % SIDE + group[None, :]
    held = ()
    for step in gl.static_range(AHEAD):
        if step < STEPS:
            loaded = _weights(words, pairs, first, step, K, GROUP, WARPS)
            # The compiler does not support `*held`.
            held = held + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    # Inputs in the order of threads: [steps, 64 behind, 32 behind, warps, threads, 16, 8 behind].
    x_smem = gl.allocate_shared_memory(
        gl.int32,
        [ROUNDS, 2, 2, WARPS, 4, 4],
        gl.SwizzledSharedLayout(1, 1, 1, order=[5, 4, 3, 2, 1, 0]),
    )
    of_load: gl.constexpr = gl.BlockedLayout([4 if ROUNDS > 1 else 2], [32], [WARPS], [0])
    at = gl.arange(0, ROUNDS * WARPS * (COLUMNS // 2), layout=of_load)
    if PDL:
        gdc_wait()
    if ROUNDS * WARPS == RUNS:
        values = gl.load(x_ptr + at)
    else:
        values = gl.load(x_ptr + at, mask=at < K // 2, other=0)
    values = values.reshape([ROUNDS, WARPS, 2, 2, 2, 2, 4]).permute([0, 2, 3, 1, 6, 4, 5])
    x_smem.store(values.reshape([ROUNDS, 2, 2, WARPS, 4, 4]))
    acc = gl.zeros([WARPS, 8, 4, 4], gl.float32, layout=of_threads)
    for step in gl.static_range(STEPS):
        inputs = x_smem.slice(step, 1).load(of_sixteen).reshape([2, 2, WARPS, 4, 4])
        low, high = inputs.permute([2, 3, 4, 1, 0]).split()
        x0, x1 = low.split()
        x2, x3 = high.split()
        x0 = gl.convert_layout(x0, of_inputs)[:, None, :, :]
        x1 = gl.convert_layout(x1, of_inputs)[:, None, :, :]
        x2 = gl.convert_layout(x2, of_inputs)[:, None, :, :]
        x3 = gl.convert_layout(x3, of_inputs)[:, None, :, :]
        sums = gl.inline_asm_elementwise(
            SUMMED, OF_SUMMED, [x0, x1, x2, x3], dtype=gl.float32, is_pure=True, pack=4
        )
        near, far, near_pair, far_pair = held[0]  # type: ignore[misc]
        acc = gl.inline_asm_elementwise(
            MULTIPLIED,
            OF_MULTIPLIED,
            [
                near,
                far,
                x0,
                x1,
                x2,
                x3,
                sums,
                near_pair[:, :, None, None],
                far_pair[:, :, None, None],
                acc,
            ],
            dtype=gl.float32,
            is_pure=True,
            pack=4,
        )
        held = held[1:]
        if step + AHEAD < STEPS:
            loaded = _weights(words, pairs, first, step + AHEAD, K, GROUP, WARPS)
            held = held + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    total = gl.sum(acc, axis=0)  # [8, 4, 4], of rows `g` and `g + 8`, the token in one of four
    layout: gl.constexpr = total.type.layout
    group = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    quad = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    place = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    feature = row + group + place // 2 * 8 + quad * 0
    inside = (feature < features) & (quad == 0) & (place % 2 == 0)
    if BIAS:
        total += gl.load(bias_ptr + feature, mask=inside, other=0.0).to(gl.float32)
    if ADD:
        total += gl.load(out_ptr + feature, mask=inside, other=0.0).to(gl.float32)
    gl.store(out_ptr + feature, total.to(out_ptr.dtype.element_ty), mask=inside)
