"""`pagewire models`: the models of a running server."""

import asyncio
from typing import Annotated

import typer

from pagewire.cli.client import DEFAULT_URL, listed_models
from pagewire.cli.table import table

_CHAT = {True: "yes", False: "no", None: "-"}  # by whether there is a chat template


def models(
    url: Annotated[str, typer.Option(help="The server's URL, with or without /v1.")] = DEFAULT_URL,
) -> None:
    """List the models that a running server serves."""
    rows = [
        (
            str(card["id"]),
            str(card.get("max_model_len", "-")),
            _CHAT[card.get("has_chat_template")],
            str(card.get("root") or "-"),
        )
        for card in asyncio.run(listed_models(url))
    ]
    print(table(("MODEL", "MAX TOKENS", "CHAT", "LOADED FROM"), rows))
