"""Parses a body and checks it against a pydantic model, with errors in plain words."""

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pagewire.errors import RequestError, invalid, quoted

Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], body: bytes) -> Model:
    """`body` as a `model`; RequestError names the first field that is not valid."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _first_error(error) from None


def validate_object(model: type[Model], value: dict[str, Any]) -> Model:
    """`value`, a body that is parsed already, as a `model`; errors as in `validate`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_error(error) from None


def _first_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        return invalid("", f"the request body is not JSON in UTF-8: {message}")
    if kind == "model_type" and not first["loc"]:
        return invalid("", "the request body is not a JSON object")
    param = path(first["loc"])
    if kind == "missing":
        return invalid(param, f"{param} is required")
    if kind == "too_long":
        limit = first["ctx"]["max_length"]
        return invalid(param, f"{param} has more than {limit} entries; give {limit} at most")
    if kind == "string_pattern_mismatch":  # an id: only ids have a pattern
        message = "give visible ASCII characters without blanks"
    return invalid(param, f"{param} is {quoted(first['input'])}: {message}")


def path(location: Sequence[int | str]) -> str:
    """`messages[0].content` for ("messages", 0, "content"), without the `<...>` tags of unions."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.startswith("<"):
            text += f".{part}" if text else part
    return text
