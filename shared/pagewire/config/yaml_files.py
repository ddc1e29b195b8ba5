"""YAML whose mappings have each key once. PyYAML itself would drop all but the last."""

from collections import Counter
from collections.abc import Iterable
from typing import Any


class RepeatedKeyError(ValueError):
    """A mapping has a key twice."""


def parse_yaml(text: str) -> Any:
    """The value of a text in YAML.

    Raises yaml.YAMLError for another text, RepeatedKeyError for a key that occurs twice.
    """
    import yaml  # here, so that commands without a file start faster

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            if isinstance(node, yaml.MappingNode):
                refuse_repeated(k.value for k, _ in node.value if isinstance(k, yaml.ScalarNode))
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)  # a safe loader


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object as a dict; RepeatedKeyError for a key that occurs twice."""
    refuse_repeated(key for key, _ in pairs)
    return dict(pairs)


def refuse_repeated(keys: Iterable[str]) -> None:
    """RepeatedKeyError names a key that occurs twice."""
    for key, times in Counter(keys).items():
        if times > 1:
            raise RepeatedKeyError(f"it has the key {key!r} {times} times; keep one")
