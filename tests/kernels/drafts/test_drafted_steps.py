"""The kernels of decode steps with drafts against their references."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from pagewire.worker.ops.contract import drafts as contract
from pagewire.worker.ops.contract import step
from pagewire.worker.ops.contract.drafts import TokenHistory
from pagewire.worker.ops.contract.sampling import PENALIZED, Adjustments
from pagewire.worker.ops.reference import drafts as reference
from pagewire.worker.ops.triton.drafts import begin, end
from pagewire.worker.protocol.speculation.prediction_drafter import PredictionDrafter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, LENGTH, VOCAB, HIDDEN, MAX_BLOCKS = 9, 160, 40, 64, 16
FIRST = 48  # columns before position 0
PADDING = SLOTS - 1


def ints(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def history(most: int, generator: torch.Generator) -> TokenHistory:
    """Few different tokens, so that suffixes repeat; slot 4 already has all its tokens."""

    def below(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32).to(DEVICE)

    positions = 40 + below(60, SLOTS)
    limits = positions + 1 + below(2 * most, SLOTS)
    limits[4] = positions[4]
    positions[PADDING] = limits[PADDING] = 0
    num_recent = below(FIRST + 1, SLOTS)
    num_recent[0] = 0
    rows = below(3, SLOTS, FIRST + LENGTH)
    ends = below(8, SLOTS, FIRST) == 0
    rows[:, :FIRST].masked_fill_(ends, -1)
    rows[:, FIRST - 1] = -1
    return TokenHistory(
        rows=rows,
        positions=positions,
        limits=limits,
        drafts=below(3, SLOTS, most),
        num_drafts=most * below(4, SLOTS).clamp(max=1),
        drafters=below(2, SLOTS),
        predictions=predictions(generator),
        num_recent=num_recent,
        first=FIRST,
    )


def predictions(generator: torch.Generator) -> torch.Tensor:
    """For half of the sequences, in step and out of step. Some end, and some drop the place."""
    made = torch.zeros(SLOTS, 4, dtype=torch.int32)
    for slot in range(0, PADDING, 2):
        predicted = int(torch.randint(1, 90, (), generator=generator))
        reached = int(torch.randint(-1, predicted + 1, (), generator=generator))
        edit = int(torch.randint(0, predicted, (), generator=generator))
        made[slot] = torch.tensor([predicted, reached, edit, slot if reached >= 0 else 0])
    return made.to(DEVICE)


def copied(held: TokenHistory) -> TokenHistory:
    return TokenHistory(
        **{
            name: value.clone() if isinstance(value := getattr(held, name), torch.Tensor) else value
            for name in TokenHistory.__slots__
        }
    )


def same(one: TokenHistory, other: TokenHistory) -> None:
    assert torch.equal(one.positions, other.positions)
    assert torch.equal(one.num_drafts, other.num_drafts)
    given_up = other.predictions[:, :1] == 0  # no other value of these is defined
    assert torch.equal(one.predictions[:, 0], other.predictions[:, 0])
    assert torch.equal(
        one.predictions.masked_fill(given_up, 0)[:-1],
        other.predictions.masked_fill(given_up, 0)[:-1],
    )
    assert torch.equal(one.drafters[:-1], other.drafters[:-1])
    for slot in range(len(one.positions) - 1):
        known = int(one.positions[slot]) + 1
        assert torch.equal(one.tokens[slot, :known], other.tokens[slot, :known])
        num_drafts = int(one.num_drafts[slot])
        assert torch.equal(one.drafts[slot, :num_drafts], other.drafts[slot, :num_drafts])


def inputs(most: int, generator: torch.Generator) -> torch.Tensor:
    """Sequences of 1 to 1 + `most` rows in any order of slots, then padding."""
    slots, places = [], []
    for slot in torch.randperm(PADDING, generator=generator).tolist():
        rows = 1 + int(torch.randint(0, most + 1, (), generator=generator))
        slots += [slot] * rows
        places += list(range(rows))
    slots += [PADDING] * 3
    places += [0] * 3
    made = torch.zeros(step.NUM_INPUTS, len(slots), dtype=torch.int32)
    made[contract.SLOTS], made[contract.PLACES] = torch.tensor(slots), torch.tensor(places)
    made[contract.OFFSETS] = -made[contract.SLOTS]
    made[step.WRITE_SLOTS] = PADDING
    made[step.WRITE_SLOTS, 1], made[step.WRITE_COLUMNS, 1], made[step.WRITE_BLOCKS, 1] = 2, 5, 77
    return made.to(DEVICE)


@pytest.mark.parametrize("most", [1, 3, 7, 15])
@pytest.mark.parametrize("seed", range(3))
def test_begin_drafted(most: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    held, given = history(most, generator), inputs(most, generator)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator).to(DEVICE)
    tables = torch.zeros(SLOTS, MAX_BLOCKS, dtype=torch.int32, device=DEVICE)
    want_tables, kept = tables.clone(), copied(held)
    want, rows = reference.begin_drafted(given, embedding, held, want_tables)
    got, found = begin.begin_drafted(given, embedding, held, tables)
    assert torch.equal(tables, want_tables)
    assert int(tables[2, 5]) == 77
    for name in contract.LocatedRows.__slots__:
        assert torch.equal(getattr(found, name), getattr(rows, name)), name
    assert torch.equal(got, want)
    same(held, kept)

    computed = found.lengths > 0
    assert not computed[given[contract.SLOTS] == 4].any(), "it has had all its tokens"
    assert (found.slots[~computed] == PADDING).all()
    assert (found.positions[computed] < held.limits[given[contract.SLOTS]][computed]).all()
    first = (given[contract.PLACES] == 0) & computed
    expected = held.tokens[found.slots.long(), found.positions.long()][first]
    assert torch.equal(got[first], embedding[expected.long()])


@pytest.mark.parametrize("most", [1, 3, 7, 15])
@pytest.mark.parametrize("seed", range(4))
def test_end_drafted(most: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    held, given = history(most, generator), inputs(most, generator)
    embedding = torch.zeros(VOCAB, HIDDEN, device=DEVICE)
    tables = torch.zeros(SLOTS, MAX_BLOCKS, dtype=torch.int32, device=DEVICE)
    _, rows = reference.begin_drafted(given, embedding, held, tables)
    places = given[contract.PLACES]
    in_step = (held.predictions[:, contract.REACHED] >= 0) & (held.num_drafts > 0)
    for slot in in_step.nonzero()[:, 0].tolist():
        draft_from_prediction(held, slot)
    # Most drafts are right.
    after = held.drafts[given[contract.SLOTS].long(), places.clamp(max=most - 1).long()]
    drawn = torch.where(torch.rand(len(places), generator=generator).to(DEVICE) < 0.8, after, 3)
    drawn = drawn.to(torch.int32)
    hidden = torch.randn(len(drawn), HIDDEN, generator=generator).to(DEVICE)
    hidden[0, 5], hidden[7, 0] = float("nan"), float("inf")
    last = torch.full((SLOTS,), 99, dtype=torch.int32, device=DEVICE)
    ours, our_last = copied(held), last.clone()
    want = reference.end_drafted(drawn, hidden, rows.slots, places, held, last)
    got = end.end_drafted(drawn, hidden, rows.slots, places, ours, our_last)
    first = places == 0
    assert torch.equal(got[contract.TOKENS], want[contract.TOKENS])
    assert torch.equal(got[:, first], want[:, first])
    assert torch.equal(our_last, last)
    same(ours, held)
    assert held.num_drafts[:PADDING].any(), "some end has come before"


def draft_from_prediction(held: TokenHistory, slot: int) -> None:
    """As in an earlier step: the drafts are those at the output's current place."""
    predicted, reached = held.predictions[slot, :2].tolist()
    following = held.tokens[slot, LENGTH - predicted + reached :][: held.drafts.shape[1]]
    held.drafts[slot, : len(following)] = following
    held.num_drafts[slot] = len(following)


def one_sequence(
    tokens: list[int],
    most: int,
    prediction: Sequence[int] = (),
    generated: int = 0,
    recent: Sequence[int] = (),
) -> TokenHistory:
    """The history of slot 0; the last `generated` of `tokens` are of the output."""
    held = TokenHistory(
        rows=torch.full((2, FIRST + LENGTH), 5, dtype=torch.int32, device=DEVICE),
        positions=ints([len(tokens) - 1, 0]),
        limits=ints([1000, 0]),
        drafts=torch.full((2, most), -7, dtype=torch.int32, device=DEVICE),
        num_drafts=ints([0, 0]),
        drafters=ints([0, 0]),
        predictions=ints([[0] * 4] * 2),
        num_recent=ints([len(recent), 0]),
        first=FIRST,
    )
    held.rows[0, FIRST - len(recent) : FIRST + len(tokens)] = ints([*recent, *tokens])
    if prediction:
        held.tokens[0, LENGTH - len(prediction) :] = ints(list(prediction))
        reached = contract.OUT_OF_STEP if generated else 0
        edit = min(generated, len(prediction))
        held.predictions[0] = ints([len(prediction), reached, edit, 0])
    return held


def take(drafts: ModuleType, held: TokenHistory, tokens: list[int]) -> list[int]:
    """The sequence draws tokens, its drafts among them; returns its next drafts."""
    rows = ints([0] * len(tokens))
    hidden, places = torch.zeros(len(tokens), HIDDEN, device=DEVICE), ints(list(range(len(tokens))))
    held.drafts[0, : len(tokens) - 1] = ints(tokens[:-1])
    drafts.end_drafted(ints(tokens), hidden, rows, places, held, ints([0, 0]))
    return held.drafts[0, : int(held.num_drafts[0])].tolist()


@pytest.mark.parametrize(
    ("tokens", "drawn", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], 3, [4, 5, 6, 1]),
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2], 3, [5, 9, 1, 2]),  # the later of two equals
        ([7, 1, 2, 3, 4, 9, 1, 2, 3, 5, 7, 1, 2], 3, [4, 9, 1, 2]),  # the longer one
        ([8, 1, 2, 1, 2, 1], 2, [1, 2, 1, 2]),  # fewer tokens followed than are drafted
        ([6, 6, 6], 6, [6, 6, 6, 6]),
        ([1, 2, 9, 8], 2, [9, 8, 2, 9]),  # one token is enough
        ([5], 5, [5, 5, 5, 5]),
        ([1, 2, 3], 4, None),
    ],
)
def test_drafts_are_what_followed(
    tokens: list[int], drawn: int, expected: list[int] | None
) -> None:
    for drafts in (reference, end):
        held = one_sequence(tokens, 4)
        arguments = (ints([drawn]), torch.zeros(1, HIDDEN, device=DEVICE), ints([0]), ints([0]))
        drafts.end_drafted(*arguments, held, ints([0, 0]))
        assert held.positions.tolist() == [len(tokens), 0]
        assert held.num_drafts.tolist() == [0 if expected is None else 4, 0]
        if expected is not None:
            assert held.drafts[0].tolist() == expected


@pytest.mark.parametrize(
    ("recent", "tokens", "drawn", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, -1], [9, 1, 2], 3, [4, 5, 6]),  # up to the end of the output
        ([1, 2, 3, 4, -1, 1, 2, 3, 6, 7, 8, 9, -1], [1, 2], 3, [6, 7, 8, 9]),  # the later one
        ([7, 1, 2, 3, 4, 4, 4, 4, -1, 2, 3, 6, -1], [7, 1, 2], 3, [4, 4, 4, 4]),  # the longer one
        ([2, 3, 4, 5, -1, 1, 2, 3, -1], [1, 2], 3, [4, 5]),  # nothing followed the longer one
        ([1, 2, 3, -1], [1, 2], 3, []),
        ([2, -1, 3, 8, -1], [1, 2], 3, [8]),  # an end is not a token
        ([-1], [5], 6, []),
        ([-1], [], 6, []),
        ([8, 6, -1], [], 6, []),  # a missing token equals no end
        ([8, 6, 4, -1, 6, 3, -1], [], 6, [3]),
        ([*[6] * 47, -1], [], 6, [6]),
    ],
)
def test_recent_outputs_are_searched_before_the_known_tokens(
    recent: list[int], tokens: list[int], drawn: int, expected: list[int]
) -> None:
    for drafts in (reference, end):
        held = one_sequence(tokens, 4, recent=recent)
        assert take(drafts, held, [drawn]) == expected
        assert held.drafters[0] == (contract.RECENT if expected else contract.SUFFIX)


@pytest.mark.parametrize("drafts", [reference, end])
def test_known_tokens_win_over_recent_outputs_with_as_many_equal_ones(drafts: ModuleType) -> None:
    held = one_sequence([1, 2, 3, 7, 8, 1, 2], 4, recent=[0, 1, 2, 3, 9, 9, -1])
    assert take(drafts, held, [3]) == [7, 8, 1, 2]
    assert held.drafters[0] == contract.SUFFIX
    held = one_sequence([2, 3, 7, 8, 1, 2], 4, recent=[0, 1, 2, 3, 9, 9, -1])
    assert take(drafts, held, [3]) == [9, 9]
    assert held.drafters[0] == contract.RECENT


TEXT = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]


@pytest.mark.parametrize("drafts", [reference, end])
def test_beside_a_draft_model_more_tokens_must_have_come_before(drafts: ModuleType) -> None:
    for tokens, expected in (
        ([1, 2, 9, 8, 1], []),
        ([7, 1, 2, 9, 8, 1], []),
        ([7, 1, 2, 9, 8, 7, 1], [9, 8, 7]),
    ):
        held = replace(one_sequence(tokens, 3), min_match=contract.SURE_MATCH)
        assert take(drafts, held, [2]) == expected


@pytest.mark.parametrize("drafts", [reference, end])
def test_drafts_are_those_of_the_prediction_while_the_output_is_in_step(
    drafts: ModuleType,
) -> None:
    held = one_sequence([20, 30, 31], 4, TEXT)  # the prompt has another token after 20
    assert take(drafts, held, [20]) == [21, 22, 23, 24]
    assert take(drafts, held, [21, 22, 23]) == [24, 25, 26, 27]
    assert held.drafters[0] == contract.PREDICTION
    assert take(drafts, held, [24, 25, 26, 27]) == [28, 29]
    # After its end the drafts come from the sequence's own tokens.
    assert take(drafts, held, [28, 29]) == []
    assert take(drafts, held, [20]) == [21, 22, 23, 24]
    assert held.drafters[0] == contract.SUFFIX


@pytest.mark.parametrize("drafts", [reference, end])
def test_an_output_is_in_step_again_behind_an_edit(drafts: ModuleType) -> None:
    held = one_sequence([1], 3, [*TEXT, 40, 41, 42, 43, 44, 45])
    assert take(drafts, held, [20]) == [21, 22, 23]
    assert take(drafts, held, [21, 22, 5]) == []  # the last of three tokens differs
    assert held.predictions[0].tolist() == [16, contract.OUT_OF_STEP, 3, 0]
    assert take(drafts, held, [24]) == [25, 26, 27]  # near the edit one token is enough
    assert take(drafts, held, [25, 26, 27]) == [28, 29, 40]
    assert take(drafts, held, [6]) == []
    assert held.predictions[0, contract.EDIT] == 8
    assert take(drafts, held, [20]) == [21, 22, 5]  # before the edit it is not
    assert held.drafters[0] == contract.SUFFIX
    assert take(drafts, held, [21]) == [22, 5, 24]
    assert take(drafts, held, [22]) == [23, 24, 25]  # unless three are equal
    assert held.drafters[0] == contract.PREDICTION


@pytest.mark.parametrize("drafts", [reference, end])
def test_an_output_that_goes_on_finds_its_place(drafts: ModuleType) -> None:
    held = one_sequence([1, *TEXT[:5]], 3, TEXT, generated=5)
    assert take(drafts, held, [25]) == [26, 27, 28]
    assert held.drafters[0] == contract.PREDICTION


@pytest.mark.parametrize("drafts", [reference, end])
def test_a_sequence_takes_the_place_of_its_prediction(drafts: ModuleType) -> None:
    text = [7 + i % 19 for i in range(90)]
    held = one_sequence([1], 7, text)
    for at in range(69):
        assert take(drafts, held, [text[at]]) == text[at + 1 : at + 8]
        assert held.drafters[0] == contract.PREDICTION
    take(drafts, held, [text[69]])
    assert held.predictions[0, contract.PREDICTED] == 0
    assert held.drafters[0] == contract.SUFFIX
    assert held.tokens[0, :71].tolist() == [1, *text[:70]]


@pytest.mark.parametrize("seed", range(12))
def test_places_are_those_of_the_drafter_of_a_cpu(seed: int) -> None:
    """The prompt has no token of the prediction: on a CPU only the output is compared."""
    generator = random.Random(seed)
    kinds = generator.choice([3, 6, 30])
    text = [generator.randrange(100, 100 + kinds) for _ in range(60)]
    held = one_sequence([1, 2, 3], 4, text)
    other = PredictionDrafter(np.array(text, np.int32), np.empty(0, np.int32))
    at = predicted = 0
    while int(held.positions[0]) < 90:
        step = []
        for _ in range(generator.randrange(1, 4)):
            if generator.random() < 0.15:  # an edit
                at += generator.randrange(-2, 5)
                step.append(generator.randrange(100, 100 + kinds))
            else:
                step.append(text[at % len(text)])
                at += 1
        made = take(reference, held, step)
        other.extend(step)
        assert other.ready == bool(held.drafters[0] == contract.PREDICTION)
        if other.ready:
            assert made == other.draft(4).tolist()
            predicted += 1
    assert predicted > 10


def test_the_search_takes_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end, "TILE", 16)
    generator = torch.Generator().manual_seed(5)
    found = 0
    for _ in range(20):
        length = int(torch.randint(1, 100, (), generator=generator))
        tokens = torch.randint(0, 3, (length,), generator=generator).tolist()
        predicted = torch.randint(0, 3, (length % 40,), generator=generator).tolist()
        recent = torch.randint(-1, 3, (length % 47,), generator=generator).tolist()
        held = one_sequence(tokens, 7, predicted, length % 2, [*recent, -1])
        ours = copied(held)
        arguments = (ints([1]), torch.zeros(1, HIDDEN, device=DEVICE), ints([0]), ints([0]))
        reference.end_drafted(*arguments, held, ints([0, 0]))
        end.end_drafted(*arguments, ours, ints([0, 0]))
        same(ours, held)
        found += int(held.num_drafts[0] > 0)
    assert found == 20


@pytest.mark.parametrize("drafts", [reference, end])
def test_tokens_of_sequences_with_penalties_are_counted(drafts: object) -> None:
    held = one_sequence([1, 2, 3], 4)
    kinds = ints([PENALIZED, 0])
    counts = torch.zeros(2, VOCAB, dtype=torch.int16, device=DEVICE)
    adjustments = Adjustments(kinds, kinds, counts, kinds, kinds, kinds)
    for token, value in ((7, 0.0), (7, 0.0), (8, float("nan"))):
        hidden = torch.full((1, HIDDEN), value, device=DEVICE)
        arguments = (ints([token]), hidden, ints([0]), ints([0]))
        out = drafts.end_drafted(*arguments, held, ints([0, 0]), adjustments)  # type: ignore[attr-defined]
    assert out[:, 0].tolist() == [step.FAILED, 1, 0, 0, contract.SUFFIX]
    assert held.tokens[0, 3:6].tolist() == [7, 7, 0], "a failed row leaves token 0"
    assert counts[0, 7] == 2
    assert counts.count_nonzero() == 1
