"""The kernels of routing: logits of all experts, then the choice among them.

The logits stay in float32. Rounded ones would often be equal, and another expert changes a token
far more than a rounding does.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import PairNumbers, Routes, Routing
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.experts.config import MAX_VECTOR_TOKENS, RouterConfig, router_config

# Below all scores that are numbers, above minus infinity, which marks experts not to choose.
LOWEST = tl.constexpr(-3e38)


@triton.jit(do_not_specialize=["tokens"])
def _logits_kernel(
    x_ptr,  # [tokens, K]
    router_ptr,  # [experts, K]
    bias_ptr,  # [experts], or None
    logits_ptr,  # [tokens, experts] float32
    counts_ptr,  # [experts] that become zeros, or None
    tokens,
    experts,
    x_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the router by BLOCK_T tokens.

    A program computes ROWS experts. The grid is `[experts / ROWS, tokens / BLOCK_T]`.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    column = tl.arange(0, BLOCK_K)[None, :]
    router = router_ptr + row * K + column
    x_tile = x_ptr + token.to(tl.int64) * x_stride + column
    if PDL:
        gdc_wait()
    if counts_ptr is not None:
        clear_counts(counts_ptr, experts, BINS)
    acc = tl.zeros((ROWS, BLOCK_T), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = start + column < K
        w = tl.load(router + start, mask=(row < experts) & inside, other=0.0)
        x = tl.load(x_tile + start, mask=(token < tokens) & inside, other=0.0)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + row, mask=row < experts, other=0.0).to(tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    out = logits_ptr + token.to(tl.int64) * experts + row  # [BLOCK_T, ROWS]
    tl.store(out, tl.trans(acc), mask=(token < tokens) & (row < experts))


@triton.jit
def clear_counts(counts_ptr, experts, BINS: tl.constexpr):
    """Let the first program set the counts of all experts to zero."""
    bins = tl.arange(0, BINS)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    tl.store(counts_ptr + bins, tl.zeros((BINS,), tl.int32), mask=(bins < experts) & first)


@triton.jit
def _choose_kernel(
    logits_ptr,  # [tokens, EXPERTS] float32
    correction_ptr,  # [EXPERTS] float32
    experts_ptr,  # [tokens, TOP_K] int32
    weights_ptr,  # [tokens, TOP_K] float32
    counts_ptr,  # [EXPERTS], or None
    numbers_ptr,  # [tokens, TOP_K], written with counts only
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CORRECTION: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of one token, and number its pairs. The grid is `[tokens]`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < EXPERTS
    if PDL:
        gdc_launch_dependents()
    if CORRECTION:
        correction = tl.load(correction_ptr + column, mask=real, other=0.0)
    if PDL:
        gdc_wait()
    scores = tl.load(logits_ptr + token * EXPERTS + column, mask=real, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if CORRECTION:
        choice += correction
    # A comparison with NaN is false, so NaN becomes the lowest score as well.
    choice = tl.where(choice > LOWEST, choice, LOWEST)
    choice = tl.where(real, choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, column, EXPERTS // GROUPS, GROUPS, TOP_GROUPS, SIGMOID)

    # A warp finds the largest integer with one instruction. The sum turns -0 into 0.
    bits = (choice + 0.0).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of the numbers
    place = tl.arange(0, BLOCK_TOP_K)
    chosen = tl.zeros((BLOCK_TOP_K,), tl.int32)
    values = tl.full((BLOCK_TOP_K,), 0.0 if SIGMOID else float("-inf"), tl.float32)
    for i in tl.static_range(TOP_K):
        # The first of equal ones.
        expert = tl.min(tl.where(keys == tl.max(keys, 0), column, BLOCK), 0)
        value = tl.sum(tl.where(column == expert, scores, 0.0), 0)
        chosen = tl.where(place == i, expert, chosen)
        values = tl.where(place == i, value, values)
        keys = tl.where(column == expert, -0x80000000, keys)
    held = token * TOP_K + place
    if counts_ptr is not None:
        mask = place < TOP_K
        number = tl.atomic_add(counts_ptr + chosen, 1, mask=mask, sem="relaxed")
        tl.store(numbers_ptr + held, number, mask=mask)
    if SIGMOID:
        weights = values / tl.sum(values, 0) if RENORMALIZE else values
    else:
        among = values if RENORMALIZE else scores
        top = tl.max(among, 0)
        weights = tl.exp(values - top) / tl.sum(tl.exp(among - top), 0)
    tl.store(experts_ptr + held, chosen, mask=place < TOP_K)
    tl.store(weights_ptr + held, weights * scale, mask=place < TOP_K)


@triton.jit
def _in_best_groups(
    choice,  # [BLOCK] float32
    column,  # [BLOCK]
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Return `choice` with minus infinity outside the best groups.

    A group counts by the sum of its two best experts with PAIRS, else by its best one.
    """
    group = column // SIZE
    sums = tl.full(choice.shape, float("-inf"), tl.float32)  # of the group of each column
    for g in tl.static_range(GROUPS):
        inside = tl.where(group == g, choice, float("-inf"))
        counted = tl.max(inside, 0)
        if PAIRS:
            first = tl.argmax(inside, 0)
            counted += tl.max(tl.where(column == first, float("-inf"), inside), 0)
        sums = tl.where(group == g, counted, sums)
    kept = tl.full(choice.shape, float("-inf"), tl.float32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(sums, 0) // SIZE
        kept = tl.where(group == best, choice, kept)
        sums = tl.where(group == best, float("-inf"), sums)
    return kept


def route(
    x: Tensor,
    router: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    config: RouterConfig | None = None,
) -> Routes:
    """Implement `ExpertOps.route`; `router` is contiguous, the rows of `x` may have any stride."""
    tokens, k = x.shape
    if tokens == 0:
        return _empty_routes(x, 0, routing)
    config = config or router_config(tokens)
    pdl = dependent_launch(x.device)
    logits = x.new_empty((tokens, routing.experts), dtype=torch.float32)
    counts = empty_counts(x, routing)
    _logits_kernel[(cdiv(routing.experts, config.rows), cdiv(tokens, config.tokens))](
        x,
        router,
        bias,
        logits,
        counts,
        tokens,
        routing.experts,
        x.stride(0),
        K=k,
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        BLOCK_T=config.tokens,
        STAGES=config.stages,
        BINS=next_power_of_2(routing.experts),
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return choose(logits, routing, correction, counts)


def empty_counts(x: Tensor, routing: Routing) -> Tensor | None:
    """Return the counters of all experts, uninitialized, if the tokens may have to be sorted."""
    if len(x) <= MAX_VECTOR_TOKENS:
        return None
    return x.new_empty(routing.experts, dtype=torch.int32)


def _empty_routes(like: Tensor, tokens: int, routing: Routing) -> Routes:
    size = tokens, routing.top_k
    experts = like.new_empty(size, dtype=torch.int32)
    return Routes(experts, like.new_empty(size, dtype=torch.float32))


def choose(
    logits: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    counts: Tensor | None = None,
) -> Routes:
    """Choose the experts of each token by its logits, `[tokens, experts]` float32.

    With `counts`, which are zeros before, the pairs of each expert are numbered.
    """
    tokens = logits.shape[0]
    routes = _empty_routes(logits, tokens, routing)
    if counts is not None:
        routes = replace(routes, numbered=PairNumbers(torch.empty_like(routes.experts), counts))
    pdl = dependent_launch(logits.device)
    _choose_kernel[(tokens,)](
        logits,
        logits if correction is None else correction,
        routes.experts,
        routes.weights,
        counts,
        None if routes.numbered is None else routes.numbered.numbers,
        routing.scale,
        EXPERTS=routing.experts,
        BLOCK=next_power_of_2(routing.experts),
        TOP_K=routing.top_k,
        BLOCK_TOP_K=next_power_of_2(routing.top_k),
        SIGMOID=routing.scoring == "sigmoid",
        RENORMALIZE=routing.renormalize,
        CORRECTION=correction is not None,
        GROUPS=routing.groups,
        TOP_GROUPS=routing.top_groups,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return routes
