"""A fixture for the tests of draft models and EAGLE heads."""

from collections.abc import Iterator

import pytest

from pagewire.worker.protocol.speculation import draft_length
from pagewire.worker.startup import loading


@pytest.fixture(autouse=True, scope="module")
def cheap() -> Iterator[None]:
    """Drafts depend neither on times that are measured here nor on load, and pauses are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "draft_cost", lambda *_: 0.05)
        patch.setattr(draft_length, "FIXED_ROWS", 1000)
        patch.setattr(draft_length, "FIRST_PAUSE", 2)
        patch.setattr(draft_length, "LONGEST_PAUSE", 2)
        yield
