"""How a field of a configuration class is declared."""

from dataclasses import field
from typing import Any


def setting(
    default: Any,
    help_text: str,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field with its default, its help text and the range of its values.

    Infinity is refused unless it is the `maximum`.
    """
    bounds = {"minimum": minimum, "maximum": maximum}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    return field(default=default, metadata={"help": help_text, **given})


def metrics_port(service: str) -> Any:
    """The port on which a service publishes its Prometheus metrics."""
    help_text = f"Port of the {service}'s Prometheus metrics; 0 takes a free one. Without a port "
    help_text += "there are no metrics."
    return setting(None, help_text, minimum=0, maximum=65535)
