"""The number of rows of a step, and the sequences of its drafts."""

from dataclasses import replace

import numpy as np
import pytest

from pagewire.worker.protocol.speculation.row_choice import RowChoice, RowCosts

ROWS = np.array([1, 2, 4, *range(8, 257, 8)], np.int32)


def costs(fixed: float, row: float, token: float = 0.0) -> RowCosts:
    """A step of n rows lasts `fixed + row * n` seconds."""
    return RowCosts(ROWS, fixed + row * ROWS, token)


def lengths(found: RowCosts, rates: list[float], most: int = 7, kv_tokens: float = 0.0) -> list:
    given = np.full(len(rates), most, np.int32)
    return RowChoice(found, most).lengths(np.array(rates), given, kv_tokens).tolist()


def test_where_rows_cost_nothing_every_likely_draft_is_made() -> None:
    assert lengths(costs(1, 0), [0.9]) == [7]
    assert lengths(costs(1, 0), [0.9] * 8) == [7] * 8


@pytest.mark.parametrize("sequences", [1, 3, 16])
def test_no_choice_is_made_where_no_rate_is_high_enough(sequences: int) -> None:
    """It is the choice that would be made."""
    generator, found = np.random.default_rng(1), costs(1, 0.05, 1e-5)
    choice, drafted = RowChoice(found, 7), 0
    for _ in range(300):
        rates = generator.random(sequences) ** 4
        most = generator.integers(0, 8, sequences).astype(np.int32)
        want, _ = choice._chosen(rates, most, 500.0)
        assert choice.lengths(rates, most, 500.0).tolist() == want.tolist()
        drafted += want.any()
    assert 0 < drafted < 300
    assert choice._least_rate(sequences) > 0.05


def test_where_a_step_takes_as_long_as_its_rows_none_is_made() -> None:
    assert lengths(costs(0, 1), [0.99]) == [0]
    assert lengths(costs(0, 1), [0.99] * 40) == [0] * 40


def test_a_draft_model_makes_as_many_drafts_as_pay_for_its_passes() -> None:
    def with_passes(seconds: float, rates: list[float]) -> list[int]:
        found = costs(1, 0)
        passes = np.full(len(ROWS), seconds)
        return lengths(replace(found, passes=passes), rates)

    assert with_passes(0, [0.9]) == [7]
    assert with_passes(0.05, [0.9] * 3) == [7] * 3
    assert with_passes(0.2, [0.9] * 8) == [5] * 8
    assert with_passes(0.2, [0.5]) == [2]
    assert with_passes(0.2, [0.1]) == [0]
    assert with_passes(1, [0.5]) == [0], "it takes as long as the model"
    # All sequences wait for the passes of one.
    assert with_passes(0.4, [0.9])[0] > 0
    assert with_passes(0.4, [0.9, 0.0, 0.0, 0.0]) == [0, 0, 0, 0]


def test_wrong_drafts_are_not_made_where_rows_cost() -> None:
    assert lengths(costs(1, 0.01), [0.0]) == [0]
    assert lengths(costs(1, 0.05), [0.1] * 16) == [0] * 16


def test_rows_go_to_the_drafts_that_are_right_most_likely() -> None:
    made = lengths(costs(1, 0.01), [0.95, 0.1, 0.6, 0.95])
    assert made[0] == made[3] > made[2] > made[1]


def test_rows_that_a_step_has_anyway_are_used() -> None:
    """A step of 5 sequences has 8 rows."""
    assert sum(lengths(costs(1, 10), [0.5] * 5)) == 3


def test_more_sequences_get_fewer_drafts() -> None:
    totals = [sum(lengths(costs(30, 1), [0.7] * n)) / n for n in (1, 8, 32, 128)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]


def test_reading_long_contexts_makes_drafts_dearer() -> None:
    found = costs(1, 0.001, token=1e-4)
    assert sum(lengths(found, [0.6], kv_tokens=10)) > sum(lengths(found, [0.6], kv_tokens=10_000))


@pytest.mark.parametrize("sequences", [1, 3, 8, 250, 256, 300])
def test_there_are_never_more_rows_than_the_largest_step_has(sequences: int) -> None:
    made = lengths(costs(1, 0), [0.99] * sequences)
    assert len(made) == sequences
    assert sequences + sum(made) <= 256 or not any(made)


def test_each_sequence_has_its_own_most() -> None:
    choice = RowChoice(costs(1, 0), 7)
    most = np.array([0, 2, 7], np.int32)
    made = choice.lengths(np.array([0.99, 0.99, 0.99]), most, 0).tolist()
    assert made == [0, 2, 7]
