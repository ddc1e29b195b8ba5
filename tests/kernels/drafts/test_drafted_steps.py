"""The kernels of decode steps with drafts against their references."""

from __future__ import annotations

import pytest
import torch

from pagewire.worker.ops.contract import drafts as contract
from pagewire.worker.ops.contract import step
from pagewire.worker.ops.contract.drafts import TokenHistory
from pagewire.worker.ops.contract.sampling import PENALIZED, Adjustments
from pagewire.worker.ops.reference import drafts as reference
from pagewire.worker.ops.triton.drafts import begin, end

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, LENGTH, VOCAB, HIDDEN, MAX_BLOCKS = 9, 160, 40, 64, 16
PADDING = SLOTS - 1


def ints(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def history(most: int, generator: torch.Generator) -> TokenHistory:
    """Tokens of few kinds, so that ends come again; slot 4 has had all its tokens."""

    def below(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32).to(DEVICE)

    positions = 40 + below(60, SLOTS)
    limits = positions + 1 + below(2 * most, SLOTS)
    limits[4] = positions[4]
    positions[PADDING] = limits[PADDING] = 0
    return TokenHistory(
        tokens=below(3, SLOTS, LENGTH),
        positions=positions,
        limits=limits,
        guesses=below(3, SLOTS, most),
        guessed=most * below(4, SLOTS).clamp(max=1),
    )


def copied(held: TokenHistory) -> TokenHistory:
    return TokenHistory(*(getattr(held, name).clone() for name in TokenHistory.__slots__))


def same(one: TokenHistory, other: TokenHistory) -> None:
    assert torch.equal(one.positions, other.positions)
    assert torch.equal(one.guessed, other.guessed)
    for slot in range(len(one.positions) - 1):
        known = int(one.positions[slot]) + 1
        assert torch.equal(one.tokens[slot, :known], other.tokens[slot, :known])
        if one.guessed[slot]:
            assert torch.equal(one.guesses[slot], other.guesses[slot])


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
@pytest.mark.parametrize("seed", range(3))
def test_end_drafted(most: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    held, given = history(most, generator), inputs(most, generator)
    embedding = torch.zeros(VOCAB, HIDDEN, device=DEVICE)
    tables = torch.zeros(SLOTS, MAX_BLOCKS, dtype=torch.int32, device=DEVICE)
    _, rows = reference.begin_drafted(given, embedding, held, tables)
    places = given[contract.PLACES]
    # Most guesses are right.
    after = held.guesses[given[contract.SLOTS].long(), places.clamp(max=most - 1).long()]
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
    assert held.guessed[:PADDING].any(), "some end has come before"


def one_sequence(tokens: list[int], most: int) -> TokenHistory:
    """The history of slot 0."""
    held = TokenHistory(
        tokens=torch.full((2, LENGTH), -5, dtype=torch.int32, device=DEVICE),
        positions=ints([len(tokens) - 1, 0]),
        limits=ints([1000, 0]),
        guesses=torch.full((2, most), -7, dtype=torch.int32, device=DEVICE),
        guessed=ints([0, 0]),
    )
    held.tokens[0, : len(tokens)] = ints(tokens)
    return held


@pytest.mark.parametrize(
    ("tokens", "drawn", "guesses"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], 3, [4, 5, 6, 1]),
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2], 3, [5, 9, 1, 2]),  # the later of two equals
        ([7, 1, 2, 3, 4, 9, 1, 2, 3, 5, 7, 1, 2], 3, [4, 9, 1, 2]),  # the longer one
        ([8, 1, 2, 1, 2, 1], 2, [1, 2, 1, 2]),  # fewer tokens followed than are guessed
        ([6, 6, 6], 6, [6, 6, 6, 6]),
        ([1, 2, 9, 8], 2, [9, 8, 2, 9]),  # one token is enough
        ([5], 5, [5, 5, 5, 5]),
        ([1, 2, 3], 4, None),
    ],
)
def test_guesses_are_what_followed(
    tokens: list[int], drawn: int, guesses: list[int] | None
) -> None:
    for drafts in (reference, end):
        held = one_sequence(tokens, 4)
        arguments = (ints([drawn]), torch.zeros(1, HIDDEN, device=DEVICE), ints([0]), ints([0]))
        drafts.end_drafted(*arguments, held, ints([0, 0]))
        assert held.positions.tolist() == [len(tokens), 0]
        assert held.guessed.tolist() == [0 if guesses is None else 4, 0]
        if guesses is not None:
            assert held.guesses[0].tolist() == guesses


def test_the_search_takes_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end, "TILE", 16)
    generator = torch.Generator().manual_seed(5)
    found = 0
    for _ in range(20):
        length = int(torch.randint(1, 100, (), generator=generator))
        tokens = torch.randint(0, 3, (length,), generator=generator).tolist()
        held = one_sequence(tokens, 7)
        ours = copied(held)
        arguments = (ints([1]), torch.zeros(1, HIDDEN, device=DEVICE), ints([0]), ints([0]))
        reference.end_drafted(*arguments, held, ints([0, 0]))
        end.end_drafted(*arguments, ours, ints([0, 0]))
        same(ours, held)
        found += int(held.guessed[0] > 0)
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
    assert out[:, 0].tolist() == [step.FAILED, 1, 0, 0]
    assert held.tokens[0, 3:6].tolist() == [7, 7, 0], "a failed row leaves token 0"
    assert counts[0, 7] == 2
    assert counts.count_nonzero() == 1
