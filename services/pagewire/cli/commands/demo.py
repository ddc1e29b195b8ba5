"""`pagewire demo`: starts everything and answers one question."""

import time
from typing import Annotated

import typer

from pagewire.cli.client import chat_answer, served_models
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.launch import launch, quiet
from pagewire.cli.launch.stack import Stack, full_stack, temporary_stack
from pagewire.models import EMBEDDED

_QUESTION = "Hello! What can you do?"


def demo(
    question: Annotated[str, typer.Argument(help="The question.")] = _QUESTION,
    model: Annotated[
        str,
        typer.Option(help="Model folder or hub id; by default the model that comes with Pagewire."),
    ] = EMBEDDED,
) -> None:
    """Start everything on free ports, stream one chat answer, and stop everything."""
    print("Starting a worker, a scheduler and a gateway ...", flush=True)
    started = time.monotonic()

    async def ask(stack: Stack) -> bool:
        print(f"Ready in {time.monotonic() - started:.1f} s at {stack.url}\n\n> {question}")
        await _ask(stack, question)
        return True

    if launch(full_stack, temporary_stack(model=model), quiet, ask) is None:
        raise typer.Exit(130)


async def _ask(stack: Stack, question: str) -> None:
    """Prints the streamed answer and its figures; CommandError if it is empty."""
    assert stack.url is not None
    names = await served_models(stack.url)
    if not names:
        raise CommandError(f"the gateway at {stack.url} is ready but serves no model")
    answer = chat_answer(
        stack.url, names[0], [{"role": "user", "content": question}], temperature=0, max_tokens=128
    )
    async for piece in answer:
        print(piece, end="", flush=True)
    if not answer.text.strip() or answer.ttft is None:
        raise CommandError(f"{names[0]} gave an empty answer ({answer.finish_reason})")
    print(
        f"\n\n{answer.tokens} tokens; time to first token {answer.ttft * 1e3:.0f} ms, "
        f"then {answer.tokens_per_second:.0f} tokens/s"
    )
