"""Sampling: noise and its statistics, tokens that filters keep, and kernels against references."""

import math
from dataclasses import replace

import pytest
import torch

from pagewire.limits import MAX_BIASES, MAX_STOP_IDS
from pagewire.worker.ops.contract.noise import GREEDY_BELOW, GROUP
from pagewire.worker.ops.contract.sampling import (
    BIASED,
    IN_PROMPT,
    MAX_COUNTED,
    NO_TOKEN,
    PENALIZED,
    Adjustments,
    SamplingState,
)
from pagewire.worker.ops.reference import sampling as reference
from pagewire.worker.ops.triton import adjustments as adjusting
from pagewire.worker.ops.triton import sampling, sampling_filters
from pagewire.worker.ops.triton.logprobs import logprobs
from support.kernels.comparison import DTYPES, FULL_SIZE, poisoned_outputs

# A ragged last chunk, one chunk, and several.
VOCABULARIES = [50, sampling.CHUNK, 4 * sampling.CHUNK + 77]
if FULL_SIZE:
    VOCABULARIES += [128256, 151936]

TOP_K = [0, 1, 5, 40, 0, 0, 0, 7, 0, 10**9]
TOP_P = [1.0, 1.0, 1.0, 0.9, 0.6, 0.999, 1e-6, 0.5, 1.0, 0.8]
MIN_P = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.02, 0.1, 0.001]
TEMPERATURE = [1.0, 0.7, 1.3, 1.0, 0.9, 1.0, 1.0, 2.0, 1.0, 1.5]
ROWS = len(TOP_K)


def make_state(rows: int, device: torch.device, **given) -> SamplingState:
    """Return rows at temperature 1 without filters, except for the columns `given`."""

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        values = torch.as_tensor(given.get(name, default), dtype=dtype, device=device)
        return values.expand(rows).clone()

    stops = torch.full((rows, MAX_STOP_IDS), -1, dtype=torch.int32, device=device)
    return SamplingState(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=column("seed", 0, torch.int64),
        index=column("index", 0, torch.int32),
        min_tokens=column("min_tokens", 0, torch.int32),
        stop_token_ids=given.get("stop_token_ids", stops),
        adjustments=given.get("adjustments"),
    )


def filtered_state(device: torch.device, seed: int = 3) -> SamplingState:
    """Return one row for each kind of filter and mixture."""
    seeds = torch.arange(ROWS) * 0x123456789AB - seed
    return make_state(
        ROWS,
        device,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        top_p=TOP_P,
        min_p=MIN_P,
        seed=seeds,
        index=torch.arange(ROWS),
    )


def assert_same_draws(
    out: torch.Tensor,
    logits: torch.Tensor,
    state: SamplingState,
) -> None:
    """Tokens equal the reference's, except groups and ids that tie up to rounding of the score."""
    assert out.dtype == torch.int32
    expected = reference.sample(logits, state)
    drawn = state.temperature[:, None] >= GREEDY_BELOW
    scores = reference.adjusted_logits(logits, state)
    scores = scores.masked_fill(drawn & ~kept_set(logits, state), -torch.inf)
    scores /= state.temperature.clamp(min=1e-5)[:, None]
    group = out.long() // GROUP
    groups, keys = reference.in_groups(scores), reference.noise_keys(state.seed, state.index)
    of_groups = reference.noisy_groups(groups, keys)
    of_ids = reference.noisy_ids(groups, group, keys)
    for row in (out != expected).nonzero()[:, 0].tolist():
        best = of_groups[row, expected[row] // GROUP]
        short = abs(best - of_groups[row, group[row]])
        within = of_ids[row].max() - of_ids[row, out[row] % GROUP]
        assert max(short, within) < 1e-4, f"row {row}: drew {out[row]}, not {expected[row]}"


def kept_set(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """Return the tokens that the sort-based reference keeps, `[rows, vocabulary]`."""
    rows = torch.arange(len(logits), device=logits.device)
    scores = reference.adjusted_logits(logits, state)
    thresholds = reference.kept_thresholds(scores, state, rows, logits.dtype)
    return scores >= thresholds[:, None]


def finalize(x: int) -> int:
    """The finalizer of MurmurHash3 for one integer."""
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
@pytest.mark.parametrize("index", [0, 77, 2**31 - 1])
def test_noise_bits_equal_plain_integers(seed, index, device):
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    first = finalize((finalize(low + 0x9E3779B9 & 0xFFFFFFFF) + index) & 0xFFFFFFFF)
    second = finalize((high + 0x85EBCA77 & 0xFFFFFFFF) ^ first)
    begin, step = first + finalize(second), second | 1
    expected = [finalize(i * step + begin & 0xFFFFFFFF) for i in range(100)]
    state = make_state(1, device, seed=seed, index=index)
    numbers = torch.arange(100, dtype=torch.int32, device=device)
    bits = reference.noise_bits(reference.noise_keys(state.seed, state.index), numbers)[0]
    assert [b & 0xFFFFFFFF for b in bits.tolist()] == expected


@pytest.mark.parametrize("rows", [16, 256])
def test_noise_of_the_kernel_has_the_bits_of_the_reference(rows, device):
    """With equal logits the token is the argmax of the noise, so the bits of the hash decide."""
    groups = 375
    seed = torch.arange(rows) * 0x9876543210F
    state = make_state(rows, device, seed=seed, index=torch.arange(rows))
    keys = reference.noise_keys(state.seed, state.index)

    def smallest(numbers: torch.Tensor) -> torch.Tensor:
        """A draw takes the smallest -log(1 - v), where v is the upper 31 bits."""
        bits = reference.noise_bits(keys, numbers)
        return (bits >> 1).bitwise_and(0x7FFFFFFF).argmin(-1).int()

    group = smallest(~torch.arange(groups, dtype=torch.int32, device=device))
    first = (group * GROUP)[:, None]
    ids = first + torch.arange(GROUP, dtype=torch.int32, device=device)
    expected = first[:, 0] + smallest(ids)
    logits = torch.zeros(rows, groups * GROUP, device=device)
    assert torch.equal(sampling.sample(logits, state, filtered=False), expected)
    assert torch.equal(reference.sample(logits, state), expected)


def test_uniform_is_inside_zero_and_one(device):
    seed = torch.arange(64, device=device)
    numbers = torch.arange(40000, dtype=torch.int32, device=device)
    keys = reference.noise_keys(seed, torch.zeros_like(seed, dtype=torch.int32))
    v = reference.noise_uniform(keys, numbers)
    assert 0 < v.min() < 1e-6
    assert 1 - 1e-6 < v.max() < 1
    assert torch.isfinite(reference.gumbel_noise(keys, numbers)).all()


def chi_square_limit(degrees: int) -> float:
    """Five standard deviations above the mean of a chi-square variable."""
    return degrees + 5 * math.sqrt(2 * degrees)


def test_uniform_bins_are_even_and_independent_over_index(device):
    seed = torch.full((2,), 42, device=device)
    bins = 16
    pairs = torch.zeros(bins, bins, device=device)
    numbers = torch.arange(20000, dtype=torch.int32, device=device)
    for index in range(0, 40, 2):
        at = torch.tensor([index, index + 1], dtype=torch.int32, device=device)
        v = (reference.noise_uniform(reference.noise_keys(seed, at), numbers) * bins).long()
        pairs += torch.bincount(v[0] * bins + v[1], minlength=bins**2).view(bins, bins)
    expected = pairs.sum() / bins**2
    assert ((pairs - expected) ** 2 / expected).sum() < chi_square_limit(bins**2 - 1)


@pytest.mark.parametrize(
    "varied",
    [
        {"seed": torch.arange(20000)},
        {"seed": torch.arange(20000) << 32},
        {"index": torch.arange(20000)},
    ],
    ids=["lower half of seed", "upper half of seed", "index"],
)
def test_equal_tokens_win_equally_often(varied, device):
    """The vocabulary has whole groups and a last one with fewer ids."""
    vocabulary = 7 * GROUP + 5
    state = make_state(20000, device, **varied)
    tokens = reference.sample(torch.zeros(20000, vocabulary, device=device), state)
    counts = torch.bincount(tokens.long(), minlength=vocabulary)
    assert len(counts) == vocabulary
    expected = 20000 / vocabulary
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(vocabulary - 1)


@pytest.mark.parametrize("varied", ["seed", "index"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1, "temperature": 1.5},
        {"top_k": 12, "top_p": 0.7, "min_p": 0.05},
    ],
)
def test_draws_follow_the_filtered_softmax(given, varied, device):
    draws, vocabulary = 20000, 32
    torch.manual_seed(0)
    logits = (2 * torch.randn(1, vocabulary, device=device)).expand(draws, -1)
    state = make_state(draws, device, **given, **{varied: torch.arange(draws)})
    counts = torch.bincount(reference.sample(logits, state).long(), minlength=vocabulary)

    one = make_state(1, device, **given)
    kept = kept_set(logits[:1], one)
    scaled = (logits[:1] / one.temperature).masked_fill(~kept, -torch.inf)
    expected = scaled.softmax(-1)[0] * draws
    assert counts[~kept[0]].sum() == 0
    seen = kept[0] & (expected > 5)
    error = (counts[seen] - expected[seen]) ** 2 / expected[seen]
    assert error.sum() < chi_square_limit(int(seen.sum()))


def test_kept_tokens_of_known_distribution(device):
    p = torch.tensor([[0.05, 0.4, 0.1, 0.15, 0.3]], device=device)

    def kept(**given) -> list[int]:
        return kept_set(p.log(), make_state(1, device, **given))[0].nonzero()[:, 0].tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [1, 4]
    assert kept(top_p=0.5) == [1, 4]
    assert kept(top_p=0.3) == [1]
    assert kept(top_p=1e-9) == [1]
    assert kept(min_p=0.3) == [1, 3, 4]
    # Of the three that top-k leaves, 0.7 of 0.85 is enough for 0.8.
    assert kept(top_k=3, top_p=0.8) == [1, 4]
    assert kept(top_p=0.84) == [1, 3, 4]


@pytest.mark.parametrize("dtype", list(dict.fromkeys([*DTYPES, torch.float32])))
@pytest.mark.parametrize("vocabulary", [50, sampling_filters.CHUNK + 77, *VOCABULARIES[3:]])
def test_pivot_search_keeps_the_tokens_of_the_sort(vocabulary, dtype, device):
    torch.manual_seed(vocabulary)
    spread = torch.tensor([0.5, 4.0], device=device).repeat(ROWS // 2)[:, None]
    logits = (spread * torch.randn(ROWS, vocabulary, device=device)).to(dtype)
    logits[:, ::7] = logits[:, :1]  # ties
    logits[:, 1::9] = 0.0
    logits[:, 2::9] = -0.0
    logits[3:5] -= 100  # only negative values
    logits[5:, sampling_filters.CHUNK :] -= 30  # chunks below every possible pivot
    state = filtered_state(device)
    with poisoned_outputs():
        thresholds = sampling_filters.kept_thresholds(logits, state)
    kept = kept_set(logits, state)
    differ = (logits.float() >= thresholds[:, None]) != kept
    # The same tokens, except those within a rounding error of the mass that top-p keeps.
    exact = state.top_p >= 1
    assert not differ[exact].any()
    mass = (logits.float() / state.temperature[:, None]).softmax(-1)
    assert (mass * differ).sum(-1).max() < (2e-6 if dtype == torch.float32 else 1e-30)


def test_filtered_draws_equal_those_of_the_reference(device):
    torch.manual_seed(1)
    logits = (3 * torch.randn(ROWS, sampling.CHUNK + 77, device=device)).to(torch.float16)
    state = filtered_state(device)
    kept = kept_set(logits, state)
    for index in range(12 if FULL_SIZE else 1):
        at = replace(state, index=state.index + index)
        with poisoned_outputs():
            out = sampling.sample(logits, at)
        assert kept.gather(1, out.long()[:, None]).all()
        assert_same_draws(out, logits, at)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_rows_beside_greedy_ones(vocabulary, dtype, device):
    torch.manual_seed(vocabulary)
    rows = 5
    logits = (3 * torch.randn(rows, vocabulary, device=device)).to(dtype)
    temperature = torch.tensor([0.0, 1.0, 0.6, 0.0, 1e-30])
    state = make_state(rows, device, temperature=temperature, seed=torch.arange(rows) - 2)
    with poisoned_outputs():
        plain = sampling.sample(logits, state, filtered=False)
        filtered = sampling.sample(logits, state, filtered=True)
    assert torch.equal(plain, filtered)
    assert_same_draws(plain, logits, state)
    greedy = [0, 3, 4]
    assert torch.equal(plain[greedy], logits[greedy].float().argmax(-1).int())


@pytest.mark.parametrize("ops", [reference, sampling])
def test_draw_does_not_depend_on_the_batch(ops, device):
    torch.manual_seed(4)
    logits = torch.randn(ROWS, 500, device=device).half()
    state = filtered_state(device)
    together = ops.sample(logits, state)
    for row in (3, 7):
        tensors = set(SamplingState.__slots__) - {"adjustments", "masks"}
        alone = SamplingState(**{name: getattr(state, name)[row : row + 1] for name in tensors})
        assert ops.sample(logits[row : row + 1], alone)[0] == together[row]


@pytest.mark.parametrize("filtered", [False, True])
def test_rows_of_nan_or_infinity_draw_a_token_of_the_vocabulary(filtered, device):
    vocabulary = sampling.CHUNK + 3
    logits = torch.randn(6, vocabulary, device=device)
    logits[0:2] = torch.nan
    logits[2:4] = -torch.inf
    logits[4:6, vocabulary - 1] = torch.inf
    state = make_state(6, device, temperature=[0.0, 1.0] * 3, seed=torch.arange(6))
    tokens = sampling.sample(logits, state, filtered)
    assert ((tokens >= 0) & (tokens < vocabulary)).all()


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("ops", [reference, sampling])
def test_stop_tokens_wait_for_min_tokens(ops, filtered, device):
    vocabulary = sampling.CHUNK + 500
    logits = torch.zeros(4, vocabulary, device=device)
    best, second, third = vocabulary - 1, 7, 9
    logits[:, best], logits[:, second], logits[:, third] = 90.0, 60.0, 30.0
    stops = torch.full((4, MAX_STOP_IDS), -1, dtype=torch.int32, device=device)
    stops[:, 0], stops[:, -1] = best, second
    state = make_state(
        4,
        device,
        temperature=[0.0, 1.0, 0.0, 1.0],
        index=[2, 2, 3, 3],
        min_tokens=3,
        top_k=5 if filtered else 0,
        stop_token_ids=stops,
    )
    assert ops.sample(logits, state, filtered).tolist() == [third, third, best, best]


@pytest.mark.parametrize("column", [0, MAX_STOP_IDS - 1])
def test_each_row_has_stop_tokens_of_its_own(column, device):
    logits = torch.zeros(3, 100, device=device)
    logits[:, 7], logits[:, 9] = 5.0, 4.0
    stops = torch.full((3, MAX_STOP_IDS), -1, dtype=torch.int32, device=device)
    stops[1, column] = 7
    state = make_state(3, device, temperature=0.0, min_tokens=1, stop_token_ids=stops)
    assert sampling.sample(logits, state, False).tolist() == [7, 9, 7]


# The kind of each row; slots are in random order.
KINDS = [0, BIASED, PENALIZED, BIASED | PENALIZED, 0, BIASED | PENALIZED, PENALIZED, BIASED, 3, 3]
ADJUSTED_SLOTS = [9, 4, 0, 11, 2, 7, 1, 10, 3, 5]


def make_adjustments(vocabulary: int, device: torch.device) -> Adjustments:
    """Random adjustments of ROWS rows; biased ids are at both edges of chunks, one row has 300."""
    generator = torch.Generator().manual_seed(vocabulary)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    slots, most = max(ADJUSTED_SLOTS) + 1, min(MAX_BIASES, vocabulary)
    edges = range(0, vocabulary, adjusting.CHUNK)
    ids = sorted({vocabulary - 1, *edges, *(edge - 1 for edge in edges[1:])})
    bias_ids = torch.full((slots, MAX_BIASES), NO_TOKEN)
    bias_ids[:, : len(ids)] = torch.tensor(ids)
    bias_ids[ADJUSTED_SLOTS[3], :most] = torch.randperm(vocabulary)[:most].sort().values
    counts = torch.randint(1, 4, (slots, vocabulary + 14), generator=generator)
    counts *= uniform(0, 1, *counts.shape) < 0.2
    counts += IN_PROMPT * (uniform(0, 1, *counts.shape) < 0.2)
    penalties = uniform(-2, 2, slots, 3)
    penalties[:, 0] = uniform(0.5, 2, slots)
    return Adjustments(
        kinds=torch.tensor(KINDS, dtype=torch.int32, device=device),
        slots=torch.tensor(ADJUSTED_SLOTS, dtype=torch.int32, device=device),
        token_counts=counts.short().to(device),
        penalties=penalties.to(device),
        bias_ids=bias_ids.int().to(device),
        biases=uniform(-9, 9, slots, MAX_BIASES).to(device),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [50, adjusting.CHUNK, adjusting.CHUNK + 77])
def test_adjusted_rows_in_a_batch_with_others(vocabulary, dtype, device, monkeypatch):
    """Greedy, drawn, filtered, with and without bans, penalties and biases, in one batch."""
    monkeypatch.setattr(adjusting, "RUNS", 4)  # of 3 rows, and one
    torch.manual_seed(vocabulary)
    logits = (3 * torch.randn(ROWS, vocabulary, device=device)).to(dtype)
    state = filtered_state(device)
    state.temperature[[2, 7]] = 0.0
    state.min_tokens[[1, 3, 8]] = 100
    likeliest = logits.topk(MAX_STOP_IDS).indices.int()
    given = {"stop_token_ids": likeliest, "adjustments": make_adjustments(vocabulary, device)}
    state = replace(state, **given)
    expected = reference.adjusted_logits(logits, state)
    with poisoned_outputs():
        adjusted = adjusting.adjusted_logits(logits, state)
        thresholds = sampling_filters.kept_thresholds(logits, state, adjusted)
        drawn = sampling.sample(logits, state)
    rows = torch.tensor(KINDS, device=device) > 0
    torch.testing.assert_close(adjusted[rows, :vocabulary], expected[rows], rtol=1e-6, atol=1e-5)
    assert torch.equal(expected[~rows], logits[~rows].float())
    differ = (expected >= thresholds[:, None]) != kept_set(logits, state)
    mass = (expected / state.temperature.clamp(min=1e-5)[:, None]).softmax(-1)
    assert (mass * differ)[state.temperature > 0].sum(-1).max() < 2e-6
    assert_same_draws(drawn, logits, state)


@pytest.mark.parametrize("ops", [reference, sampling])
def test_adjustments_are_those_of_the_formula(ops, device):
    """A greedy row takes the best token after biases, bans and penalties, in this order."""
    counts = [0, 3, IN_PROMPT, IN_PROMPT + 1, 0, 2]
    logits = [1.0, 4.0, 3.0, -2.0, 2.5, 6.0]
    biases = {0: 0.5, 3: 5.0, 5: 1.0}
    repetition, frequency, presence, banned = 1.25, 0.3, 0.4, 5

    def adjust(token: int) -> float:
        value = logits[token] + biases.get(token, 0)
        if token == banned:
            return -math.inf
        count = counts[token] & MAX_COUNTED
        if counts[token] != 0:
            value = value / repetition if value > 0 else value * repetition
        return value - frequency * count - presence * (count > 0)

    adjustments = Adjustments(
        kinds=torch.tensor([BIASED | PENALIZED], dtype=torch.int32, device=device),
        slots=torch.zeros(1, dtype=torch.int32, device=device),
        token_counts=torch.tensor([counts], dtype=torch.int16, device=device),
        penalties=torch.tensor([[repetition, frequency, presence]], device=device),
        bias_ids=torch.full((1, MAX_BIASES), NO_TOKEN, dtype=torch.int32, device=device),
        biases=torch.zeros(1, MAX_BIASES, device=device),
    )
    adjustments.bias_ids[0, : len(biases)] = torch.tensor(list(biases), dtype=torch.int32)
    adjustments.biases[0, : len(biases)] = torch.tensor(list(biases.values()))
    stops = torch.full((1, MAX_STOP_IDS), banned, dtype=torch.int32, device=device)
    state = make_state(
        1, device, temperature=0.0, min_tokens=1, stop_token_ids=stops, adjustments=adjustments
    )
    given = torch.tensor([logits], device=device)
    expected = torch.tensor([[adjust(token) for token in range(6)]], device=device)
    torch.testing.assert_close(reference.adjusted_logits(given, state), expected)
    assert ops.sample(given, state).item() == expected.argmax()


def test_filters_tie_adjusted_logits_that_differ_below_the_precision_of_the_model(device):
    """Biases below the precision of the logits' dtype do not change the tokens of top-k."""
    logits = torch.tensor([[-8.0, 8.0, 8.0, 7.0]], device=device).half()
    adjustments = make_adjustments(4, device)
    adjustments.kinds.fill_(BIASED)
    adjustments.biases[ADJUSTED_SLOTS[0]] = 0
    adjustments.biases[ADJUSTED_SLOTS[0], 0] = 2.0**-10  # of the first and the last id
    adjustments.bias_ids[ADJUSTED_SLOTS[0], 0] = 1
    draws = 16
    one = {name: getattr(adjustments, name)[:1].expand(draws) for name in ("kinds", "slots")}
    one = {name: values.contiguous() for name, values in one.items()}
    seeds = torch.arange(draws)
    state = make_state(draws, device, top_k=1, seed=seeds, adjustments=replace(adjustments, **one))
    rows = logits.expand(draws, -1).contiguous()
    for ops in (reference, sampling):
        assert set(ops.sample(rows, state).tolist()) == {1, 2}


def test_rows_may_have_any_stride(device):
    logits = torch.randn(3, 5000, device=device)
    state = make_state(3, device, top_k=4, seed=torch.arange(3))
    near = logits[:, :4500].contiguous()
    assert torch.equal(sampling.sample(logits[:, :4500], state), sampling.sample(near, state))


@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_logprobs(vocabulary, k, device):
    torch.manual_seed(k)
    # Distinct logits, so that the order of the top is unique.
    order = torch.stack([torch.randperm(vocabulary, device=device) for _ in range(3)])
    logits = order.float() * (8 / vocabulary) - 4
    tokens = torch.tensor([0, vocabulary - 1, vocabulary // 2], dtype=torch.int32, device=device)
    with poisoned_outputs():
        out = logprobs(logits, tokens, k)
    expected = reference.logprobs(logits, tokens, k)
    assert torch.equal(out[1], expected[1])
    torch.testing.assert_close(out[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[2], expected[2], rtol=1e-5, atol=1e-5)
    assert torch.equal(out[3], expected[3])
    assert out[3].tolist() == [
        vocabulary - int(row[token]) for row, token in zip(order, tokens, strict=True)
    ]


def test_tied_tokens_share_a_rank(device):
    logits = torch.zeros(3, VOCABULARIES[-1], device=device)
    logits[:, 7] = 1.0
    logits[1, -1] = 1.0
    logits[2] = -torch.inf
    tokens = torch.tensor([9, 7, 0], dtype=torch.int32, device=device)
    assert logprobs(logits, tokens, 0)[3].tolist() == [2, 1, 1]
    assert reference.logprobs(logits, tokens, 0)[3].tolist() == [2, 1, 1]


def test_logprobs_of_rows_of_nan_or_infinity_stay_within_their_row(device):
    logits = torch.randn(3, VOCABULARIES[-1], device=device)
    logits[1] = torch.nan
    logits[2] = -torch.inf
    tokens = torch.zeros(3, dtype=torch.int32, device=device)
    _, ids, _, _ = logprobs(logits, tokens, 20)
    expected = reference.logprobs(logits[:1], tokens[:1], 20)[1]
    assert torch.equal(ids[:1], expected)
    assert ((ids >= 0) & (ids < logits.shape[1])).all()


def test_too_many_logprobs_are_refused(device):
    with pytest.raises(ValueError, match="k is 21"):
        logprobs(torch.zeros(1, 50, device=device), torch.zeros(1).int(), 21)
