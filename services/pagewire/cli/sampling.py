"""The flags of `generate` and `chat` for the sampling and the end of an answer."""

import inspect
import math
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer


def _flag(kind: Any, text: str, metavar: str | None = None) -> Any:
    return Annotated[kind, typer.Option(help=text, metavar=metavar, show_default=False)]


_FLAGS = {
    "temperature": _flag(
        float | None, "Sampling temperature, 0 is greedy; by default the model's.", "NUMBER"
    ),
    "max_tokens": _flag(
        int | None,
        "Maximum number of tokens in an answer; by default the server's limit.",
        "INTEGER",
    ),
    "min_tokens": _flag(int | None, "Minimum number of tokens in an answer.", "INTEGER"),
    "top_p": _flag(
        float | None, "Keep the likeliest tokens that have this probability together.", "NUMBER"
    ),
    "top_k": _flag(int | None, "Keep so many of the likeliest tokens; 0 keeps all.", "INTEGER"),
    "min_p": _flag(
        float | None,
        "Keep tokens with at least this fraction of the likeliest one's probability.",
        "NUMBER",
    ),
    "seed": _flag(int | None, "Seed: the same one gives the same answer.", "INTEGER"),
    "presence_penalty": _flag(
        float | None, "Subtracted from the logits of tokens that the answer has.", "NUMBER"
    ),
    "frequency_penalty": _flag(
        float | None, "Subtracted from a token's logit as often as the answer has it.", "NUMBER"
    ),
    "repetition_penalty": _flag(
        float | None, "Divides the logits of tokens that prompt or answer have.", "NUMBER"
    ),
    "stop": _flag(
        list[str] | None, "Text that ends the answer; may be given several times.", "TEXT"
    ),
    "ignore_eos": Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-sequence token.")
    ],
}


def with_sampling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds these flags to a command. The function gets `options`, the fields that were given."""

    @wraps(function)
    def command(**given: Any) -> Any:
        chosen = {name: given.pop(name) for name in _FLAGS}
        for name, value in chosen.items():
            if isinstance(value, float) and not math.isfinite(value):
                flag = "--" + name.replace("_", "-")
                raise typer.BadParameter(f"{value} is not finite; give a number", param_hint=flag)
        return function(options={n: v for n, v in chosen.items() if _is_given(v)}, **given)

    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.name != "options"]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if name == "ignore_eos" else None,
            annotation=annotation,
        )
        for name, annotation in _FLAGS.items()
    ]
    parameters = [*own, *added]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _is_given(value: Any) -> bool:
    """Whether a flag is given. Zero is a value; an absent flag is None, empty, or False."""
    return value is not None and value is not False and value != []
