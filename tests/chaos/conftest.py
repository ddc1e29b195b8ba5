"""How large the chaos tests are."""

from pathlib import Path

import pytest

FULL_SIZE = 400


@pytest.fixture
def requests(pytestconfig: pytest.Config) -> int:
    """Requests of each test."""
    return int(pytestconfig.getoption("--requests"))


@pytest.fixture
def is_full_size(requests: int) -> bool:
    """Whether the tests should take their time."""
    return requests >= FULL_SIZE


@pytest.fixture
def minutes(pytestconfig: pytest.Config) -> float:
    """How long the soak test lasts."""
    return float(pytestconfig.getoption("--minutes"))


@pytest.fixture
def soak_output(pytestconfig: pytest.Config) -> Path | None:
    """Where the soak test writes its result."""
    given = pytestconfig.getoption("--soak-output")
    return None if given is None else Path(given)
