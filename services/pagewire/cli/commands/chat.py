"""`pagewire chat`: a conversation in the terminal."""

import asyncio
import contextlib
from typing import Annotated, Any

import typer

from pagewire.cli.client import DEFAULT_URL, chat_answer, listed_models
from pagewire.cli.errors import CommandError
from pagewire.cli.sampling import with_sampling


@with_sampling
def chat(
    options: dict[str, Any],
    url: Annotated[str, typer.Option(help="The server's URL, with or without /v1.")] = DEFAULT_URL,
    model: Annotated[
        str | None,
        typer.Option(help="Name of the model; by default the first one that the server lists."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> None:
    """Chat with the model of a running server. Ctrl-C interrupts an answer, Ctrl-D exits."""
    cards = asyncio.run(listed_models(url))
    model = model or str(cards[0]["id"])
    if any(card["id"] == model and card.get("has_chat_template") is False for card in cards):
        raise CommandError(
            f"{model} has no chat template, so it cannot chat; `pagewire generate` continues a text"
        )
    print(f"{model} at {url}. Ctrl-C interrupts an answer, Ctrl-D exits.")
    messages = [{"role": "system", "content": system}] if system else []
    while (question := _ask()) is not None:
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        text = _answer(url, model, messages, options)
        messages.append({"role": "assistant", "content": text})


def _ask() -> str | None:
    """The next question; None at the end of input."""
    # Importing readline adds line editing and a history to input(). Not every Python has it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            return input("\n> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D exits)", end="")


def _answer(url: str, model: str, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    """Prints an answer as it arrives and returns its text, which is incomplete if the answer is
    interrupted or fails."""
    answer = chat_answer(url, model, messages, **options)

    async def stream() -> None:
        async for piece in answer:
            print(piece, end="", flush=True)

    try:
        asyncio.run(stream())
        print()
    except KeyboardInterrupt:
        print(" (interrupted)")
    except CommandError as error:
        print(f"({error})")
    return answer.text
