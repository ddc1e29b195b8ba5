"""The kernels of routing: logits of all experts, then the choice among them.

The logits stay in float32. Rounded ones would often be equal, and another expert changes a token
far more than a rounding does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import Routes, Routing
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.experts.config import RouterConfig, router_config

# Below all scores that are numbers, above minus infinity, which marks experts not to choose.
LOWEST = tl.constexpr(-3e38)


@triton.jit(do_not_specialize=["tokens"])
def _logits_kernel(
    x_ptr,  # [tokens, K]
    router_ptr,  # [experts, K]
    bias_ptr,  # [experts], or None
    logits_ptr,  # [tokens, experts] float32
    tokens,
    experts,
    x_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
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
def _choose_kernel(
    logits_ptr,  # [tokens, EXPERTS] float32
    correction_ptr,  # [EXPERTS] float32
    experts_ptr,  # [tokens, TOP_K] int32
    weights_ptr,  # [tokens, TOP_K] float32
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
    """Choose the experts of one token. The grid is `[tokens]`."""
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    choose_for_token(
        logits_ptr, correction_ptr, experts_ptr, weights_ptr, token, scale, EXPERTS, BLOCK, TOP_K,
        BLOCK_TOP_K, SIGMOID, RENORMALIZE, CORRECTION, GROUPS, TOP_GROUPS, 1
    )  # fmt: skip


@triton.jit
def choose_for_token(
    logits_ptr,  # [tokens, EXPERTS] float32
    correction_ptr,  # [EXPERTS] float32
    experts_ptr,  # [tokens, TOP_K] int32
    weights_ptr,  # [tokens, TOP_K] float32
    token,
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
    COPIES: tl.constexpr,
):
    """Choose the experts of one token.

    Each of COPIES warps has all scores and computes the same, so that warps exchange nothing. The
    scores are compared as integers: a warp finds their largest with one instruction.
    """
    column = tl.arange(0, BLOCK)[None, :]
    copy = tl.arange(0, COPIES)[:, None]
    real = column < EXPERTS
    # The L1 cache may hold older logits than those that other programs have just stored.
    logits = logits_ptr + token * EXPERTS + column + copy * 0  # [COPIES, BLOCK]
    held = real & (copy < COPIES)
    scores = tl.load(logits, mask=held, other=float("-inf"), cache_modifier=".cg")
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if CORRECTION:
        choice += tl.load(correction_ptr + column, mask=real, other=0.0)
    # A comparison with NaN is false, so NaN becomes the lowest score as well.
    choice = tl.where(choice > LOWEST, choice, LOWEST)
    choice = tl.where(real, choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, column, EXPERTS // GROUPS, GROUPS, TOP_GROUPS, SIGMOID)

    bits = (choice + 0.0).to(tl.int32, bitcast=True)  # the sum turns -0 into 0
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of the numbers
    place = tl.arange(0, BLOCK_TOP_K)[None, :]
    chosen = tl.zeros((COPIES, BLOCK_TOP_K), tl.int32)
    values = tl.full((COPIES, BLOCK_TOP_K), 0.0 if SIGMOID else float("-inf"), tl.float32)
    for i in tl.static_range(TOP_K):
        largest = tl.max(keys, 1, keep_dims=True)
        # The first of equal ones.
        expert = tl.min(tl.where(keys == largest, column, BLOCK), 1, keep_dims=True)
        value = tl.sum(tl.where(column == expert, scores, 0.0), 1, keep_dims=True)
        chosen = tl.where(place == i, expert, chosen)
        values = tl.where(place == i, value, values)
        keys = tl.where(column == expert, -0x80000000, keys)
    if SIGMOID:
        weights = values / tl.sum(values, 1, keep_dims=True) if RENORMALIZE else values
    else:
        among = values if RENORMALIZE else scores
        top = tl.max(among, 1, keep_dims=True)
        weights = tl.exp(values - top) / tl.sum(tl.exp(among - top), 1, keep_dims=True)
    at = token * TOP_K + place + copy * 0
    stored = (place < TOP_K) & (copy == 0)
    tl.store(experts_ptr + at, chosen, mask=stored)
    tl.store(weights_ptr + at, weights * scale, mask=stored)


@triton.jit
def _in_best_groups(
    choice,  # [COPIES, BLOCK] float32
    column,  # [1, BLOCK]
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
        counted = tl.max(inside, 1, keep_dims=True)
        if PAIRS:
            first = tl.argmax(inside, 1, keep_dims=True)
            rest = tl.where(column == first, float("-inf"), inside)
            counted += tl.max(rest, 1, keep_dims=True)
        sums = tl.where(group == g, counted, sums)
    kept = tl.full(choice.shape, float("-inf"), tl.float32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(sums, 1, keep_dims=True) // SIZE
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
        return empty_routes(x, 0, routing)
    config = config or router_config(tokens)
    pdl = dependent_launch(x.device)
    logits = x.new_empty((tokens, routing.experts), dtype=torch.float32)
    _logits_kernel[(cdiv(routing.experts, config.rows), cdiv(tokens, config.tokens))](
        x,
        router,
        bias,
        logits,
        tokens,
        routing.experts,
        x.stride(0),
        K=k,
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        BLOCK_T=config.tokens,
        STAGES=config.stages,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return choose(logits, routing, correction)


def empty_routes(like: Tensor, tokens: int, routing: Routing) -> Routes:
    size = tokens, routing.top_k
    experts = like.new_empty(size, dtype=torch.int32)
    return Routes(experts, like.new_empty(size, dtype=torch.float32))


def choose(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Routes:
    """Choose the experts of each token by its logits, `[tokens, experts]` float32."""
    tokens = logits.shape[0]
    routes = empty_routes(logits, tokens, routing)
    pdl = dependent_launch(logits.device)
    _choose_kernel[(tokens,)](
        logits,
        logits if correction is None else correction,
        routes.experts,
        routes.weights,
        routing.scale,
        **choice_constants(routing, correction),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return routes


def choice_constants(routing: Routing, correction: Tensor | None) -> dict[str, int]:
    """Return the constants of a kernel that chooses experts."""
    return {
        "EXPERTS": routing.experts,
        "BLOCK": next_power_of_2(routing.experts),
        "TOP_K": routing.top_k,
        "BLOCK_TOP_K": next_power_of_2(routing.top_k),
        "SIGMOID": routing.scoring == "sigmoid",
        "RENORMALIZE": routing.renormalize,
        "CORRECTION": correction is not None,
        "GROUPS": routing.groups,
        "TOP_GROUPS": routing.top_groups,
    }
