"""Bodies parsed and checked by a model in one pass."""

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pagewire.errors import RequestError, invalid

Model = TypeVar("Model", bound=BaseModel)

_SHOWN_CHARACTERS = 60


def parse(model: type[Model], body: bytes) -> Model:
    """`body` as a `model`; RequestError names the first field at fault."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _first_fault(error) from None


def _first_fault(error: ValidationError) -> RequestError:
    fault = error.errors(include_url=False)[0]
    kind, message = fault["type"], fault["msg"]
    if kind == "json_invalid":
        return invalid("", f"the request body is not JSON in UTF-8: {message}")
    if kind == "model_type" and not fault["loc"]:
        return invalid("", "the request body is not a JSON object")
    param = path(fault["loc"])
    if kind == "missing":
        return invalid(param, f"{param} is required")
    if kind == "too_long":
        most = fault["ctx"]["max_length"]
        return invalid(param, f"{param} has more than {most} entries; give {most} at most")
    return invalid(param, f"{param} is {_shown(fault['input'])}: {message}")


def path(location: Sequence[int | str]) -> str:
    """`messages[0].content` for ("messages", 0, "content"); `<...>` tags of unions are left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.startswith("<"):
            text += f".{part}" if text else part
    return text


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
