"""The size of the chaos tests, and fleets that tests share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.processes.fleet import SIMULATED
from support.processes.fleet_checks import FULL_SIZE
from support.processes.shared_fleet import SharedFleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_fleet(is_full_size: bool) -> AsyncIterator[SharedFleet]:
    """A fleet for tests that use their module's event loop.

    A small run has other tests beside it, so its steps are long: streams leave some time of two
    cores.
    """
    shared = SharedFleet(SIMULATED if is_full_size else (*SIMULATED, "--speedup=0.05"))
    try:
        yield shared
    finally:
        await shared.stop()


@pytest.fixture(scope="session")
def requests(pytestconfig: pytest.Config) -> int:
    """Number of requests of each test."""
    return int(pytestconfig.getoption("--requests"))


@pytest.fixture(scope="session")
def is_full_size(requests: int) -> bool:
    """Whether this is a long run, such as `make chaos`."""
    return requests >= FULL_SIZE


@pytest.fixture
def minutes(pytestconfig: pytest.Config) -> float:
    """Duration of the soak test."""
    return float(pytestconfig.getoption("--minutes"))


@pytest.fixture
def soak_output(pytestconfig: pytest.Config) -> Path | None:
    """The file for the figures of the soak test."""
    given = pytestconfig.getoption("--soak-output")
    return None if given is None else Path(given)
