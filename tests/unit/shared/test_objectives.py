"""Latency objectives: each limit holds alone, and a limit that is not set is always met."""

from pagewire.objectives import Objectives


def test_a_request_meets_both_objectives_or_none() -> None:
    objectives = Objectives(ttft_ms=200, tpot_ms=50)
    assert objectives.met_by(0.2, 0.05)
    assert not objectives.met_by(0.201, 0.05)
    assert not objectives.met_by(0.2, 0.051)


def test_one_token_has_no_tpot() -> None:
    assert Objectives(ttft_ms=200, tpot_ms=0).met_by(0.1, None)


def test_what_is_not_set_is_no_limit() -> None:
    assert Objectives().met_by(1e9, 1e9)
    assert not Objectives(tpot_ms=1).met_by(0.0, 0.002)
