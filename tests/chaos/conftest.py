"""How large the chaos tests are."""

import pytest


@pytest.fixture
def requests(pytestconfig: pytest.Config) -> int:
    """Requests of each test."""
    return int(pytestconfig.getoption("--requests"))
