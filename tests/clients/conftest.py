"""Tests of clients' libraries, which `make clients` installs in their own environment.

In other environments the tests are skipped. Nothing here imports the project.
"""

import os
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from clients.servers import PYTHON, Servers, running_servers

# Names of other machines that a library tried to resolve.
_others: list[str] = []


def _stay_here() -> None:
    """Disables telemetry and price lists from the network; a look-up of another machine fails.

    Libraries read the variables when they are imported.
    """
    for name in ("DO_NOT_TRACK", "HF_HUB_OFFLINE", "OPENAI_AGENTS_DISABLE_TRACING"):
        os.environ[name] = "1"
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ["LANGSMITH_TRACING"] = "false"
    resolve = socket.getaddrinfo

    def local_only(host: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in (None, "localhost", "127.0.0.1", "::1"):
            _others.append(name)
            raise OSError(f"{name} is another machine")
        return resolve(host, *arguments, **options)

    socket.getaddrinfo = local_only


# The project's environment has no litellm; its other tests must not be affected.
if find_spec("litellm") is not None:
    _stay_here()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The servers, which all tests share."""
    if not PYTHON.exists():
        pytest.skip(f"the servers need the project's environment, and there is no {PYTHON}")
    with running_servers() as started:
        yield started


@pytest.fixture(scope="session", autouse=True)
def only_this_machine() -> Iterator[None]:
    """Fails if a library looked up another machine, even if the library then continued."""
    yield
    assert _others == []


def pytest_report_header() -> str:
    """Which environment has the libraries."""
    return f"client libraries: {sys.prefix}"
