"""The fields of a request that are refused, or ignored and named.

No model declares hints, refused fields and unknown ones. Others are ignored where the model's chat
template leaves them out.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, get_args
from urllib.parse import quote

from pydantic import BaseModel

from pagewire.errors import invalid, quoted
from pagewire.gateway.api.fields import Strict

# The header of an answer that names the ignored fields.
IGNORED_HEADER = "x-pagewire-ignored"
# A head of some kilobytes may be too large for clients and proxies.
_MAX_NAMES = 16
_MAX_NAME_LENGTH = 64
_SAFE = "[]._-="


def check_extras(
    request: Strict, refuse_unknown: bool, unread: Sequence[str] = ()
) -> tuple[str, ...]:
    """Checks the extra fields of a request and of all objects in it; returns the ignored ones.

    RequestError for a field with an effect that is not implemented, and for an unknown field if
    `refuse_unknown`. The same holds for `unread` inputs, which the model's chat template leaves
    out. The returned names are safe in a header, and have at most a kilobyte in total:
    `messages[].mood` stands for the field in any message.
    """
    ignored: dict[str, None] = {}
    for path, general, model in _objects(request, "", ""):
        for name, value in (model.model_extra or {}).items():
            if name in model.hints:
                continue
            if name in model.refused:
                accepted = model.refused[name]
                if value is not None and not any(_same(value, each) for each in accepted):
                    field = path + name
                    raise invalid(
                        field, f"{field} is {quoted(value)}, which is not supported; remove it"
                    )
            elif refuse_unknown:
                raise invalid(path + name, f"{path}{name} is not a known field; remove it")
            else:
                ignored[general + name] = None
    if refuse_unknown and unread:
        raise invalid(
            unread[0],
            f"{unread[0]} is not rendered by this model's chat template; leave it out, or start "
            "the scheduler with another --chat-template",
        )
    return _header_names([*ignored, *unread])


def _objects(model: Strict, path: str, general: str) -> Iterator[tuple[str, str, Strict]]:
    """An object and those in it, each with the prefix of its fields, with and without indices."""
    yield path, general, model
    for name in _fields_with_objects(type(model)):
        value = getattr(model, name)
        if isinstance(value, Strict):
            yield from _objects(value, f"{path}{name}.", f"{general}{name}.")
        elif isinstance(value, list | dict):
            for key, item in enumerate(value) if isinstance(value, list) else value.items():
                if isinstance(item, Strict):
                    yield from _objects(item, f"{path}{name}[{key}].", f"{general}{name}[].")


@cache
def _fields_with_objects(model: type[BaseModel]) -> tuple[str, ...]:
    """The fields that may hold objects; others, such as lists of token ids, are not searched."""
    fields = model.model_fields.items()
    return tuple(name for name, field in fields if _mentions_objects(field.annotation))


def _mentions_objects(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(map(_mentions_objects, get_args(annotation)))


def _header_names(names: list[str]) -> tuple[str, ...]:
    shown = [_header_name(name) for name in names[:_MAX_NAMES]]
    more = len(names) - _MAX_NAMES
    return (*shown, f"and {more} more") if more > 0 else tuple(shown)


def _header_name(name: str) -> str:
    """A name in visible ASCII: other characters are percent-encoded, as in URLs."""
    # Cut first, so that a name of megabytes costs nothing.
    encoded = quote(name[:_MAX_NAME_LENGTH], safe=_SAFE, errors="replace")
    cut = len(name) > _MAX_NAME_LENGTH or len(encoded) > _MAX_NAME_LENGTH
    return encoded[:_MAX_NAME_LENGTH] + "..." if cut else encoded


def _same(value: Any, accepted: Any) -> bool:
    """Equality of value and type: in Python true equals 1."""
    return type(value) is type(accepted) and bool(value == accepted)
