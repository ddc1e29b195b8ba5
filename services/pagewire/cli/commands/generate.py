"""`pagewire generate`: one prompt, one answer."""

import asyncio
import sys
from typing import Annotated, Any

import typer

from pagewire.cli.client import (
    DEFAULT_URL,
    Answer,
    chat_answer,
    listed_models,
    model_cards,
    text_answer,
)
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.launch import launch, quiet
from pagewire.cli.launch.stack import Stack, full_stack, temporary_stack
from pagewire.cli.sampling import with_sampling
from pagewire.models import EMBEDDED

FROM_INPUT = "-"


@with_sampling
def generate(
    options: dict[str, Any],
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt; without it, or with -, it is read from standard input.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="The server's URL, with or without /v1. Without this flag the server at "
            f"{DEFAULT_URL} is used, or one is started for this prompt.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="For a running server: the name of a model that it serves, by default the first. "
            "For a server that is started: a model folder or hub id, by default the model that "
            "comes with Pagewire."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text without a chat template.")
    ] = False,
) -> None:
    """Print the answer to one prompt while it is generated."""
    text = _read_prompt(prompt)
    at = url or DEFAULT_URL
    cards = asyncio.run(listed_models(at) if url else model_cards(at))
    if cards:
        asyncio.run(_print(_ask(at, cards, model, text, system, raw, options)))
        return

    async def on_own_stack(stack: Stack) -> bool:
        assert stack.url is not None
        served = await listed_models(stack.url)
        await _print(_ask(stack.url, served, None, text, system, raw, options))
        return True

    started = model or EMBEDDED
    print(
        f"No server answers at {at}: starting one with the model {started} for this prompt. "
        "`pagewire run` starts one that stays.",
        file=sys.stderr,
        flush=True,
    )
    if launch(full_stack, temporary_stack(model=started), quiet, on_own_stack) is None:
        raise typer.Exit(130)


def _read_prompt(given: str | None) -> str:
    """The given prompt, otherwise standard input; CommandError if there is no prompt."""
    if given is not None and given != FROM_INPUT:
        return given
    if given is None and sys.stdin.isatty():
        raise CommandError(
            'there is no prompt; give one, as in `pagewire generate "Hello!"`, or pipe it in, as '
            "in `echo Hello | pagewire generate`"
        )
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CommandError("the prompt from standard input is not UTF-8; convert it") from error
    if not text.strip():
        raise CommandError("the prompt from standard input is empty")
    return text.removesuffix("\n")


def _ask(
    url: str,
    cards: list[dict[str, Any]],
    model: str | None,
    prompt: str,
    system: str | None,
    raw: bool,
    options: dict[str, Any],
) -> Answer:
    name = model or str(cards[0]["id"])
    no_template = [card["id"] for card in cards if card.get("has_chat_template") is False]
    if not raw and name in no_template:
        print(f"{name} has no chat template: it continues the text.", file=sys.stderr)
        raw = True
    if raw:
        if system is not None:
            raise CommandError("--system needs a chat template; leave it out")
        return text_answer(url, name, prompt, **options)
    messages = [{"role": "system", "content": system}] if system else []
    return chat_answer(url, name, [*messages, {"role": "user", "content": prompt}], **options)


async def _print(answer: Answer) -> None:
    async for piece in answer:
        print(piece, end="", flush=True)
    print()
