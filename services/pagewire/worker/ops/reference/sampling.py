"""Drawing tokens from logits in plain torch; see `contract.sampling`.

Tokens are drawn by the Gumbel-max method (Maddison, Tarlow and Minka, 2014, "A* Sampling"). A score
is `logit / temperature`. With independent Gumbel noise for each token:

- The argmax of `score + noise` is a sample of the softmax of the scores.
- The largest `score + noise` of a group is distributed as the logsumexp of the group's scores plus
  one noise value, independently of which token has it.

So a group of `GROUP` neighbouring ids is drawn first, with one noise value for each group, then one
id of that group. Noise for every id of the vocabulary would cost three times as much as reading the
logits.

The noise is a hash of the request's seed, the token's index in its request, and the number of the
group or id. It depends on nothing else: equal logits give equal tokens in every batch and on every
worker.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from pagewire.worker.ops.contract.noise import (
    GREEDY_BELOW,
    GROUP,
    KEY_BITS,
    LARGEST_BELOW_ONE,
    MIX_FIRST,
    MIX_SECOND,
    SEED_HIGH_OFFSET,
    SEED_LOW_OFFSET,
    SERIES_BELOW,
)
from pagewire.worker.ops.contract.sampling import (
    BIASED,
    MAX_COUNTED,
    PENALIZED,
    Adjustments,
    SamplingState,
    TokenMasks,
)

# An arithmetic sequence for each row, which the hash mixes: first term and step, `[rows]` int32.
NoiseKeys = tuple[Tensor, Tensor]


def sample(logits: Tensor, state: SamplingState, filtered: bool = True) -> Tensor:
    scores = adjusted_logits(logits, state, filtered)  # [rows, vocabulary]
    drawn = state.temperature >= GREEDY_BELOW
    if filtered:
        narrowed = (state.top_k > 0) | (state.top_p < 1) | (state.min_p > 0)
        rows = (drawn & narrowed).nonzero()[:, 0]
        if len(rows) > 0:
            narrow = scores[rows]
            thresholds = kept_thresholds(narrow, state, rows, logits.dtype)
            scores[rows] = narrow.masked_fill_(narrow < thresholds[:, None], -torch.inf)
    tokens = scores.argmax(-1).int()
    rows = drawn.nonzero()[:, 0]
    if len(rows) > 0:
        groups = in_groups(scores[rows] * (1 / state.temperature[rows])[:, None])
        keys = noise_keys(state.seed[rows], state.index[rows])
        group = noisy_groups(groups, keys).argmax(-1)
        within = noisy_ids(groups, group, keys).argmax(-1)
        tokens[rows] = (group * GROUP + within).int()
    return tokens


def await_masks(ready: Tensor, mask_rows: Tensor, stamps: Tensor) -> None:
    rows = mask_rows >= 0
    slots, wanted = mask_rows[rows].to(ready.device), stamps[rows].to(ready.device)
    while bool((ready[slots] < wanted).any()):
        time.sleep(1e-5)


def fetch_masks(host: Tensor, mask_rows: Tensor, masks: Tensor) -> None:
    slots = mask_rows[mask_rows >= 0]
    masks[slots] = host[slots.to(host.device)].to(masks.device)


def note_time(times: Tensor, turns: Tensor) -> None:
    times[int(turns[0])] = time.perf_counter_ns()


def in_groups(scores: Tensor) -> Tensor:
    """Return scores `[rows, vocabulary]` as `[rows, groups, GROUP]`, padded with -inf."""
    missing = -scores.shape[1] % GROUP
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    return scores.view(len(scores), scores.shape[1] // GROUP, GROUP)


def noisy_groups(groups: Tensor, keys: NoiseKeys) -> Tensor:
    """Return the logsumexp of each group plus noise, `[rows, groups]`; see `in_groups`."""
    numbers = torch.arange(groups.shape[1], dtype=torch.int32, device=groups.device)
    return groups.logsumexp(-1) + gumbel_noise(keys, ~numbers)


def noisy_ids(groups: Tensor, group: Tensor, keys: NoiseKeys) -> Tensor:
    """Return scores plus noise, `[rows, GROUP]`, of the ids in the group that each row drew.

    Args:
        groups: `[rows, groups, GROUP]`, see `in_groups`.
        group: `[rows]`, the drawn group.
        keys: the sequences of the rows.
    """
    ids = torch.arange(GROUP, dtype=torch.int32, device=groups.device) + (group * GROUP)[:, None]
    within = groups[torch.arange(len(group), device=groups.device), group]
    return within + gumbel_noise(keys, ids.int())


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    at = tokens.long()[:, None]
    # Ranks compare logits: different logits may round to the same log probability.
    ranks = (logits > logits.gather(1, at)).sum(-1) + 1
    normalized = logits.float().log_softmax(-1)
    top, ids = normalized.topk(k)
    return normalized.gather(1, at)[:, 0], ids.int(), top, ranks.int()


def adjusted_logits(logits: Tensor, state: SamplingState, adjusted: bool = True) -> Tensor:
    """Return the logits after biases, bans, penalties and masks, `[rows, vocabulary]` float32.

    A copy. Biases are added first. Then stop tokens that are not allowed yet get -inf, and
    penalties are applied. Tokens that a mask excludes get -inf last.

    Args:
        logits: `[rows, vocabulary]`.
        state: the rows' parameters.
        adjusted: False promises that no row has a bias or penalty.
    """
    vocabulary = logits.shape[1]
    adjustments = state.adjustments if adjusted else None
    scores = logits.float()
    if adjustments is not None:
        rows = (adjustments.kinds & BIASED).nonzero()[:, 0]
        slots = adjustments.slots[rows]
        # NO_TOKEN writes to one more column than the vocabulary has.
        biases = scores.new_zeros(len(rows), vocabulary + 1)
        ids = adjustments.bias_ids[slots].clamp(max=vocabulary)
        biases.scatter_(1, ids.long(), adjustments.biases[slots])
        scores = scores.index_add(0, rows, biases[:, :vocabulary])
    scores = ban_stop_tokens(scores, state)
    if adjustments is not None:
        rows = (adjustments.kinds & PENALIZED).nonzero()[:, 0]
        slots = adjustments.slots[rows]
        seen = adjustments.token_counts[slots, :vocabulary]
        scores[rows] = penalized(scores[rows], seen, adjustments.penalties[slots])
    if state.masks is not None:
        ban_excluded_tokens(scores, state.masks)
    return scores


def penalized(logits: Tensor, seen: Tensor, penalties: Tensor) -> Tensor:
    """Apply penalties to logits: repetition, then frequency and presence.

    The repetition penalty is from Keskar et al., 2019, "CTRL", the others from OpenAI's API.

    Args:
        logits: `[n, vocabulary]` float32.
        seen: `[n, vocabulary]` int16, `token_counts` of these rows.
        penalties: `[n, 3]`, see `Adjustments`.
    """
    repetition, frequency, presence = penalties.unsqueeze(-1).unbind(1)  # [n, 1] each
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    count = seen & MAX_COUNTED
    return torch.where(seen != 0, repeated, logits) - (frequency * count + presence * (count > 0))


def count_tokens(tokens: Tensor, slots: Tensor, adjustments: Adjustments) -> None:
    """Count one more output token for each slot with penalties; counts stop at MAX_COUNTED.

    Args:
        tokens: `[n]` int32.
        slots: `[n]` int32; a slot with penalties occurs once at most.
        adjustments: by slot; its counts are changed in place.
    """
    rows = (adjustments.kinds[slots] & PENALIZED).nonzero()[:, 0]
    at = slots[rows], tokens[rows]
    seen = adjustments.token_counts[at]
    adjustments.token_counts[at] = seen + ((seen & MAX_COUNTED) < MAX_COUNTED).short()


def ban_stop_tokens(logits: Tensor, state: SamplingState) -> Tensor:
    """Return a copy of `[rows, vocabulary]` with -inf at stop tokens that are not allowed yet."""
    early = (state.index < state.min_tokens)[:, None] & (state.stop_token_ids >= 0)
    # Tokens that are not banned write to one more column than the vocabulary has.
    rows, vocabulary = logits.shape
    banned = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=logits.device)
    ids = torch.where(early, state.stop_token_ids, vocabulary).clamp(max=vocabulary)
    banned.scatter_(1, ids.long(), True)
    return logits.masked_fill(banned[:, :vocabulary], -torch.inf)


def ban_excluded_tokens(logits: Tensor, masks: TokenMasks) -> None:
    """Set the `logits [rows, vocabulary]` of tokens that a mask excludes to -inf, in place."""
    rows = (masks.rows >= 0).nonzero()[:, 0]
    bits = torch.arange(8, dtype=torch.uint8, device=masks.words.device)
    given = masks.words[masks.rows[rows].long()].view(torch.uint8)
    allowed = (given[..., None] >> bits) & 1  # [n, bytes, 8], little-endian
    excluded = allowed.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(excluded, -torch.inf)


def kept_thresholds(
    logits: Tensor, state: SamplingState, rows: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the smallest logit that `top_k`, `top_p` and `min_p` keep, `[n]` float32.

    Args:
        logits: `[n, vocabulary]` float32.
        state: the parameters of all rows.
        rows: `[n]`, the rows of `state` that the logits belong to; none of them is greedy.
        dtype: the dtype of the model's logits. Logits whose upper `KEY_BITS` bits are equal are
            tied.
    """
    temperature, top_k = state.temperature[rows, None], state.top_k[rows, None]
    top_p, min_p = state.top_p[rows, None], state.min_p[rows, None]
    ordered = logits.sort(-1, descending=True).values
    peak = ordered[:, :1]
    floor = peak + min_p.log() * temperature  # log(0) = -inf keeps all

    last = torch.where(top_k > 0, top_k, logits.shape[1]).clamp(max=logits.shape[1]) - 1
    floor = torch.maximum(floor, _smallest_tied(ordered.gather(1, last.long()), dtype))

    kept = ordered >= floor
    mass = ((ordered - peak) * (1 / temperature)).exp().double().masked_fill_(~kept, 0)
    above = mass.cumsum(-1) - mass
    kept &= (above < top_p.double() * mass.sum(-1, keepdim=True)) | (top_p >= 1)
    kept[:, 0] = True
    pivot = _smallest_tied(ordered.gather(1, kept.sum(-1, keepdim=True) - 1), dtype)
    return torch.maximum(floor, pivot)[:, 0]


def _smallest_tied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest float32 that ties with `x`: its upper `KEY_BITS` bits are the same."""
    low = (1 << (32 - KEY_BITS[dtype])) - 1
    bits = x.view(torch.int32)
    least = torch.where(bits >= 0, bits & ~low, bits | low).view(torch.float32)
    return torch.where(x.isinf(), x, least)


def gumbel_noise(keys: NoiseKeys, numbers: Tensor) -> Tensor:
    """Return `-log(-log(u))`, `[rows, n]` float32, for `u = 1 - noise_uniform(...)`."""
    v = noise_uniform(keys, numbers)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4))))
    exponential = torch.where(v < SERIES_BELOW, series, -torch.log(1 - v))
    return exponential.log_().neg_()


def noise_uniform(keys: NoiseKeys, numbers: Tensor) -> Tensor:
    """Map the upper 31 bits of the hash to float32 in (0, 1), `[rows, n]`."""
    bits = noise_bits(keys, numbers)
    upper = bits.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)
    return upper.float().add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST_BELOW_ONE)


def noise_bits(keys: NoiseKeys, numbers: Tensor) -> Tensor:
    """Hash (seed, index, number) to 32 uniform bits, `[rows, n]` int32.

    The finalizer of MurmurHash3 (Appleby, 2011, `fmix32`) mixes the terms of a row's arithmetic
    sequence. A number costs one round, and rows whose sequences have different steps share no two
    neighbouring terms.

    Args:
        keys: the sequences of the rows.
        numbers: `[n]` or `[rows, n]` int32: token ids, or the complements of group numbers, which
            are negative and therefore no ids.
    """
    begin, step = keys
    return _mix((numbers * step[:, None]).add_(begin[:, None]))


def noise_keys(seed: Tensor, index: Tensor) -> NoiseKeys:
    """Return the arithmetic sequence of each row: first term and step.

    The two halves of the seed and the index give each row a 64-bit key. At a fixed index the key
    is a bijection of the seed. One half, made odd, is the step. The first term depends on
    both halves, because the step has no influence on number 0. Arithmetic is modulo 2^32 on int32.

    Args:
        seed: `[rows]` int64.
        index: `[rows]` int32.
    """
    low = (seed & 0xFFFFFFFF) + SEED_LOW_OFFSET
    high = (seed >> 32) + SEED_HIGH_OFFSET
    first = _mix(_mix(_wrap(low)).add_(index))
    second = _mix(_wrap(high).bitwise_xor_(first))
    return first + _mix(second.clone()), second | 1


def _mix(x: Tensor) -> Tensor:
    """Apply the 32-bit finalizer of MurmurHash3 to int32 bit patterns, in place."""
    x.bitwise_xor_(_shift_right(x, 16)).mul_(MIX_FIRST - 2**32)
    x.bitwise_xor_(_shift_right(x, 13)).mul_(MIX_SECOND - 2**32)
    return x.bitwise_xor_(_shift_right(x, 16))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int32 right, filling with zeros."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _wrap(x: Tensor) -> Tensor:
    """Reduce int64 modulo 2^32 to int32."""
    return ((x + 2**31) & 0xFFFFFFFF).sub_(2**31).int()
