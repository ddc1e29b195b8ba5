"""The output of `pagewire ps` for services that it cannot reach."""

import asyncio
from typing import Any

import pytest

from pagewire.cli.commands import ps
from pagewire.cli.launch.ports import free_port
from pagewire.cli.launch.running import _arguments


def test_a_gateway_that_ends_while_it_is_asked_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def cards(url: str) -> list[dict[str, Any]]:
        return [{"id": "m"}]

    monkeypatch.setattr(ps, "model_cards", cards)
    load = asyncio.run(ps._gateway_load(f"http://127.0.0.1:{free_port()}"))
    assert load == "does not answer"


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("/v/bin/python3.12 /v/bin/pagewire run --port 1", ["run", "--port", "1"]),
        ("/v/bin/python -m pagewire.cli.main worker", ["worker"]),
        ("pagewire gateway", ["gateway"]),
        ("sudo pagewire run", []),
        ("/bin/sh -c pagewire run", []),
        ("timeout 60 /v/bin/pagewire run", []),
        ("", []),
    ],
)
def test_a_command_that_runs_pagewire_is_no_service_itself(line: str, arguments: list[str]) -> None:
    assert list(_arguments(line.split())) == arguments
