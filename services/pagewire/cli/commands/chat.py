"""`pagewire chat`: a conversation at the terminal."""

import asyncio
import contextlib
from typing import Annotated

import typer

from pagewire.cli.client import DEFAULT_URL, chat_answer, first_model
from pagewire.cli.errors import CommandError


def chat(
    url: Annotated[str, typer.Option(help="The server's URL.")] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Model to talk to; by default the first one served.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
) -> None:
    """Talk with the model of a running server. Ctrl-C interrupts an answer, Ctrl-D ends."""
    model = model or asyncio.run(first_model(url))
    print(f"{model} at {url}. Ctrl-C interrupts an answer, Ctrl-D ends.")
    messages = [{"role": "system", "content": system}] if system else []
    options = {"temperature": temperature, "max_tokens": max_tokens}
    while (question := _ask()) is not None:
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        text = _answer(url, model, messages, options)
        messages.append({"role": "assistant", "content": text})


def _ask() -> str | None:
    """The next question; None at the end of input."""
    # Line editing and history for input(), where Python has it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            return input("\n> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)", end="")


def _answer(
    url: str, model: str, messages: list[dict[str, str]], options: dict[str, float | int | None]
) -> str:
    """Prints an answer as it comes; what there is of it when it is interrupted or fails."""
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
