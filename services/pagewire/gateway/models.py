"""Which served model a request gets."""

from collections.abc import Iterable

from pagewire.errors import Code, RequestError, invalid


def find_model(name: str | None, served: Iterable[str]) -> str:
    """The model that a request names, or the only one; RequestError if there is none."""
    names = sorted(served)
    if not names:
        raise RequestError(Code.UNAVAILABLE, "no scheduler serves a model yet; retry later")
    known = ", ".join(names)
    if name is None and len(names) == 1:
        return names[0]
    if name is None:
        raise invalid("model", f"model is required; served are {known}")
    if name not in names:
        raise RequestError(
            Code.NOT_FOUND, f"the model {name!r} does not exist; served are {known}", "model"
        )
    return name
