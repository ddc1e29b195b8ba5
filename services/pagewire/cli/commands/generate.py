"""`pagewire generate`: one prompt, one answer."""

import asyncio
from typing import Annotated, Any

import typer

from pagewire.cli.client import DEFAULT_URL, Answer, chat_answer, served_models, text_answer
from pagewire.cli.launch.launch import launch, quiet
from pagewire.cli.launch.stack import Stack, full_stack, temporary_stack
from pagewire.models import EMBEDDED


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    url: Annotated[
        str,
        typer.Option(
            help="The server's URL. If no server answers there, one is started for this prompt."
        ),
    ] = DEFAULT_URL,
    model: Annotated[
        str | None,
        typer.Option(
            help="For a running server: the name of a model that it serves, by default the first. "
            "For a server that is started: a model folder or hub id, by default the model that "
            "comes with Pagewire."
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text without a chat template.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature, 0 is greedy; by default the server's."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of the answer; by default the server's limit.")
    ] = None,
) -> None:
    """Print the answer to one prompt while it is generated."""
    options = {"temperature": temperature, "max_tokens": max_tokens}
    models = asyncio.run(served_models(url))
    if models:
        asyncio.run(_print(_ask(url, model or models[0], prompt, raw, options)))
        return

    async def on_own_stack(stack: Stack) -> bool:
        assert stack.url is not None
        names = await served_models(stack.url)
        assert names  # it is ready
        await _print(_ask(stack.url, names[0], prompt, raw, options))
        return True

    values = temporary_stack(model=model or EMBEDDED)
    if launch(full_stack, values, quiet, on_own_stack) is None:
        raise typer.Exit(130)


def _ask(url: str, model: str, prompt: str, raw: bool, options: dict[str, Any]) -> Answer:
    if raw:
        return text_answer(url, model, prompt, **options)
    return chat_answer(url, model, [{"role": "user", "content": prompt}], **options)


async def _print(answer: Answer) -> None:
    async for piece in answer:
        print(piece, end="", flush=True)
    print()
