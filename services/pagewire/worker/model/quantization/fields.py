"""Fields of a quantization_config. Each is honoured or refused. This module needs no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.worker.errors import SetupError

_REMEDY = "use other weights of this model, quantized or not"


class Fields:
    """An object of config.json whose fields are read and removed one by one.

    `check_all_taken` refuses the remaining fields, so that none is ignored silently.
    """

    def __init__(self, method: str, values: Mapping[str, Any], path: str = "") -> None:
        self.method = method
        self.path = path or "quantization_config"
        self._left = dict(values)

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a field, or `default` if it is null or absent."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def names(self) -> tuple[str, ...]:
        """The names of the remaining fields."""
        return tuple(self._left)

    def take_object(self, name: str) -> "Fields | None":
        """A field that is an object; None if it is null or absent."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refused(name, value, "it must be an object")
        return Fields(self.method, value, f"{self.path}.{name}")

    def take_one_of(self, name: str, supported: Sequence[Any], default: Any) -> Any:
        """The value of a field that must be one of `supported`."""
        value = self.take(name, default)
        if not any(value == one and type(value) is type(one) for one in supported):
            words = ", ".join(map(repr, supported))
            raise self.refused(name, value, f"supported are {words}")
        return value

    def take_names(self, name: str) -> tuple[str, ...]:
        """A field that is a list of texts, or of nested lists of texts."""
        return tuple(self._texts(name, self.take(name, [])))

    def skip(self, *names: str) -> None:
        """Removes fields about how the weights were made, which do not change how they are read."""
        for name in names:
            self._left.pop(name, None)

    def check_all_taken(self) -> None:
        """Raises SetupError for a remaining field, unless it is null or empty."""
        for name, value in self._left.items():
            if value not in (None, False, [], {}):
                raise self.refused(name, value, "this field is not supported")

    def refused(self, name: str, value: Any, why: str) -> SetupError:
        """The error for a value of a field."""
        return SetupError(
            f"config.json: quant_method {self.method!r}: {self.path}.{name} is {value!r}; "
            f"{why}; {_REMEDY}"
        )

    def _texts(self, name: str, value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, Sequence):
            raise self.refused(name, value, "it must be a list of names")
        return [text for item in value for text in self._texts(name, item)]
