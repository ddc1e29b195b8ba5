"""A fixture for the tests of draft models and EAGLE heads."""

import pytest

from pagewire.worker.protocol.speculation import draft_length
from pagewire.worker.startup import loading


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts depend neither on times that are measured here nor on load, and pauses are short."""
    monkeypatch.setattr(loading, "draft_cost", lambda *_: 0.05)
    monkeypatch.setattr(draft_length, "FIXED_ROWS", 1000)
    monkeypatch.setattr(draft_length, "FIRST_PAUSE", 2)
    monkeypatch.setattr(draft_length, "LONGEST_PAUSE", 2)
