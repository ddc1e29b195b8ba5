"""The part of the gateway's limits that one model's open requests leave to other models."""

import pytest

from pagewire.gateway.http.model_shares import ModelShares


def test_a_single_model_may_use_everything() -> None:
    shares = ModelShares(3, 100)
    assert [shares.take("a", 100, 1) for _ in range(5)] == [None] * 5


def test_one_of_two_models_may_use_half_of_the_requests() -> None:
    shares = ModelShares(4, 100)
    assert [shares.take("a", 1, 2) for _ in range(2)] == [None] * 2
    reason = shares.take("a", 1, 2)
    assert reason == "2 requests for the model 'a' are being answered already"
    assert [shares.take("b", 1, 2) for _ in range(2)] == [None] * 2
    shares.give_back("a", 1)
    assert shares.take("a", 1, 2) is None


def test_one_of_two_models_may_use_half_of_the_bytes() -> None:
    shares = ModelShares(40, 100)
    assert shares.take("a", 45, 2) is None
    assert "bodies of 45 bytes" in (shares.take("a", 6, 2) or "")
    assert shares.take("a", 5, 2) is None
    assert shares.take("b", 50, 2) is None


@pytest.mark.parametrize("limits", [(1, 100), (100, 10)])
def test_a_model_without_open_requests_may_have_one(limits: tuple[int, int]) -> None:
    """Otherwise more models than requests, or a body above the share, would never be served."""
    shares = ModelShares(*limits)
    assert shares.take("a", 9, 3) is None
    assert shares.take("a", 9, 3) is not None
    assert shares.take("b", 9, 3) is None
