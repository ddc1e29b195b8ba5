"""Drawing tokens from logits in plain torch.

A token is drawn by the Gumbel-max method: the argmax of `logit / temperature + noise` is a sample
of the softmax (Maddison, Tarlow and Minka, 2014, "A* Sampling"). The noise is a hash of the
request's seed, the token's index in the request and the vocabulary id, and nothing else, so a
request resumed elsewhere draws what it would have drawn here, whatever runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Below this temperature a row is greedy: 1 / temperature would leave the noise no bits.
GREEDY_BELOW = 1e-5

# Added to the two halves of the seed so that seed 0 is no fixed point of the mixing: the 32-bit
# golden ratio and a constant of xxHash32.
SEED_LOW_OFFSET = 0x9E3779B9
SEED_HIGH_OFFSET = 0x85EBCA77
# The multipliers of MurmurHash3's 32-bit finalizer.
MIX_FIRST = 0x85EBCA6B
MIX_SECOND = 0xC2B2AE35

LARGEST_BELOW_ONE = 1.0 - 2.0**-24
# Under this, -log(1 - v) comes from its series, because 1 - v would round the digits of v away.
SERIES_BELOW = 2.0**-6


@dataclass(frozen=True, slots=True)
class SamplingState:
    """How each row of a batch is drawn; every tensor lies on the device of the logits.

    Attributes:
        temperature: `[rows]` float32, 0 is greedy.
        top_k: `[rows]` int32, 0 is off.
        top_p: `[rows]` float32, 1 is off.
        min_p: `[rows]` float32, 0 is off.
        seed: `[rows]` int64, the request's seed.
        index: `[rows]` int32, the index of the drawn token in its request, from 0.
        min_tokens: `[rows]` int32; the stop tokens cannot be drawn while `index` is below it.
        stop_token_ids: `[rows, 16]` int32, -1 is none.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    index: Tensor
    min_tokens: Tensor
    stop_token_ids: Tensor


def sample(logits: Tensor, state: SamplingState, filtered: bool = True) -> Tensor:
    """Draw one token a row.

    Temperature is applied first, then `min_p`, `top_k` and `top_p` on the resulting distribution,
    `top_p` relative to the mass that the other two left. Tokens tied at a filter's boundary are
    all kept. Of tied scores the lowest id wins.

    Args:
        logits: `[rows, vocabulary]`.
        state: the rows' parameters.
        filtered: False promises that no row has a `top_k`, `top_p` or `min_p` set and that none
            need be looked at.

    Returns:
        `[rows]` int32 token ids.
    """
    scores = ban_stop_tokens(logits.float(), state)  # [rows, vocabulary]
    drawn = state.temperature >= GREEDY_BELOW
    if filtered:
        narrowed = (state.top_k > 0) | (state.top_p < 1) | (state.min_p > 0)
        rows = (drawn & narrowed).nonzero()[:, 0]
        if len(rows) > 0:
            narrow = scores[rows]
            thresholds = kept_thresholds(narrow, state, rows)
            scores[rows] = narrow.masked_fill_(narrow < thresholds[:, None], -torch.inf)
    rows = drawn.nonzero()[:, 0]
    if len(rows) > 0:
        noise = gumbel_noise(state.seed[rows], state.index[rows], logits.shape[1])
        scores[rows] = noise.addcmul_(scores[rows], (1 / state.temperature[rows])[:, None])
    return scores.argmax(-1).int()


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log probability of each row's token and of its `k` most likely tokens.

    They are of the softmax of the logits as the model gave them: before temperature and filters.

    Args:
        logits: `[rows, vocabulary]`.
        tokens: `[rows]` int32.
        k: 0 to 20.

    Returns:
        `[rows]` float32 of the tokens, `[rows, k]` int32 ids, most likely first, and
        `[rows, k]` float32.
    """
    normalized = logits.float().log_softmax(-1)
    top, ids = normalized.topk(k)
    chosen = normalized.gather(1, tokens.long()[:, None])[:, 0]
    return chosen, ids.int(), top


def ban_stop_tokens(logits: Tensor, state: SamplingState) -> Tensor:
    """Return a copy of `[rows, vocabulary]` with -inf at stop tokens that may not come yet."""
    early = (state.index < state.min_tokens)[:, None] & (state.stop_token_ids >= 0)
    # One column more than the vocabulary takes the writes of absent ids.
    rows, vocabulary = logits.shape
    banned = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=logits.device)
    ids = torch.where(early, state.stop_token_ids, vocabulary).clamp(max=vocabulary)
    banned.scatter_(1, ids.long(), True)
    return logits.masked_fill(banned[:, :vocabulary], -torch.inf)


def kept_thresholds(logits: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    """Return the logits `[n]` from which `top_k`, `top_p` and `min_p` keep tokens.

    Args:
        logits: `[n, vocabulary]` float32.
        state: the parameters, none of them greedy.
        rows: `[n]`, which rows of the state the logits belong to.
    """
    temperature, top_k = state.temperature[rows, None], state.top_k[rows, None]
    top_p, min_p = state.top_p[rows, None], state.min_p[rows, None]
    ordered = logits.sort(-1, descending=True).values
    peak = ordered[:, :1]
    kept = ordered >= peak + min_p.log() * temperature  # log(0) = -inf keeps all

    last = torch.where(top_k > 0, top_k, logits.shape[1]).clamp(max=logits.shape[1]) - 1
    kept &= ordered >= ordered.gather(1, last.long())

    mass = ((ordered - peak) * (1 / temperature)).exp().double().masked_fill_(~kept, 0)
    above = mass.cumsum(-1) - mass
    kept &= (above < top_p.double() * mass.sum(-1, keepdim=True)) | (top_p >= 1)
    kept[:, 0] = True
    return ordered.gather(1, kept.sum(-1, keepdim=True) - 1)[:, 0]


def gumbel_noise(seed: Tensor, index: Tensor, vocabulary: int) -> Tensor:
    """Return `-log(-log(u))`, `[rows, vocabulary]` float32, for `u = 1 - noise_uniform(...)`."""
    v = noise_uniform(seed, index, vocabulary)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4))))
    exponential = torch.where(v < SERIES_BELOW, series, -torch.log(1 - v))
    return exponential.log_().neg_()


def noise_uniform(seed: Tensor, index: Tensor, vocabulary: int) -> Tensor:
    """Map the hash's upper 31 bits to float32 in (0, 1), `[rows, vocabulary]`."""
    bits = noise_bits(seed, index, vocabulary)
    upper = bits.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)
    return upper.float().add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST_BELOW_ONE)


def noise_bits(seed: Tensor, index: Tensor, vocabulary: int) -> Tensor:
    """Hash (seed, index, id) to 32 uniform bits, `[rows, vocabulary]` int32.

    The seed's halves and the index give a 64-bit key of each row, which is a bijection of the
    seed at each index; two rounds of MurmurHash3's finalizer mix each half of it into the id
    (Appleby, 2011, MurmurHash3, `fmix32`). Arithmetic is modulo 2^32 on int32.

    Args:
        seed: `[rows]` int64.
        index: `[rows]` int32.
        vocabulary: how many ids, from 0.
    """
    low = (seed & 0xFFFFFFFF) + SEED_LOW_OFFSET
    high = (seed >> 32) + SEED_HIGH_OFFSET
    first = _mix(_mix(_wrap(low)).add_(index))  # [rows]
    second = _mix(_wrap(high).bitwise_xor_(first))
    ids = torch.arange(vocabulary, dtype=torch.int32, device=seed.device)
    return _mix(_mix(ids + first[:, None]).bitwise_xor_(second[:, None]))


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer of int32 bit patterns, in place."""
    x.bitwise_xor_(_shift_right(x, 16)).mul_(MIX_FIRST - 2**32)
    x.bitwise_xor_(_shift_right(x, 13)).mul_(MIX_SECOND - 2**32)
    return x.bitwise_xor_(_shift_right(x, 16))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int32 right, filling with zeros."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _wrap(x: Tensor) -> Tensor:
    """Reduce int64 modulo 2^32 to int32."""
    return ((x + 2**31) & 0xFFFFFFFF).sub_(2**31).int()
