"""What `pagewire ps` says of services that cannot be asked."""

import asyncio
from typing import Any

import pytest

from pagewire.cli.commands import ps
from pagewire.cli.launch.ports import free_port


def test_a_gateway_that_ends_while_it_is_asked_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def cards(url: str) -> list[dict[str, Any]]:
        return [{"id": "m"}]

    monkeypatch.setattr(ps, "model_cards", cards)
    load = asyncio.run(ps._gateway_load(f"http://127.0.0.1:{free_port()}"))
    assert load == "does not answer"
