"""Tools, and which of them the model may or must call."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from pagewire.errors import invalid, quoted
from pagewire.gateway.conversation.limits import ToolLimits, count_nodes

ToolMode = Literal["auto", "none", "required", "named"]

# OpenAI's names, and the separators that servers of the Model Context Protocol use.
_NAME = re.compile(r"[A-Za-z0-9_.\-/:]{1,128}")
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    `parameters` is a JSON schema. Errors call the tool `field`, and its schema `schema_name`.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    field: str = "tools"
    schema_name: str = "parameters"

    def to_json(self) -> dict[str, Any]:
        """The tool as chat templates get it from transformers."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}

    @property
    def schema_field(self) -> str:
        """The name of the schema in errors."""
        return f"{self.field}.{self.schema_name}"

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments, which are an object even if the parameters name no type.

        Without parameters it is the schema of an empty object.
        """
        if not self.parameters:
            return {"type": "object", "additionalProperties": False}
        return {"type": "object", **self.parameters}

    def argument_types(self) -> dict[str, frozenset[str]]:
        """The JSON types that each argument may have; an empty set stands for any."""
        properties = (self.parameters or {}).get("properties")
        if not isinstance(properties, dict):
            return {}
        types = _ArgumentTypes(self.parameters or {})
        return {name: types.of(schema) for name, schema in properties.items()}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`auto`: the model decides. `required`: it must call a tool. `named`: it must call this."""

    mode: ToolMode = "auto"
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a conversation. `max_calls` None allows any number of calls."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    max_calls: int | None = None

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model gets: none if calls are not allowed."""
        return () if self.choice.mode == "none" or self.max_calls == 0 else self.tools

    @property
    def forced(self) -> tuple[Tool, ...]:
        """The tools from which the model must call one; empty if it need not call any."""
        if self.choice.mode == "named":
            return tuple(tool for tool in self.tools if tool.name == self.choice.name)
        return self.tools if self.choice.mode == "required" else ()

    @property
    def call_limit(self) -> int | None:
        """The maximum number of calls in an answer."""
        if self.parallel and self.choice.mode != "named":
            return self.max_calls
        return 1 if self.max_calls is None else min(1, self.max_calls)

    def check(self, limits: ToolLimits) -> None:
        """RequestError names a field that is not valid."""
        if len(self.tools) > limits.max_tools:
            raise invalid(
                "tools",
                f"tools has {len(self.tools)} entries; at most {limits.max_tools} are allowed: "
                "send fewer, or raise --max-tools",
            )
        names: set[str] = set()
        nodes = 0
        for tool in self.tools:
            place = f"{tool.field}.name"
            if not _NAME.fullmatch(tool.name):
                raise invalid(
                    place, f"{place} is {quoted(tool.name)}; use 1 to 128 letters, digits and _-./:"
                )
            if tool.name in names:
                raise invalid(
                    place, f"{place} is {quoted(tool.name)}, as another tool's; rename one"
                )
            names.add(tool.name)
            schema_type = (tool.parameters or {}).get("type", "object")
            if schema_type != "object":
                place = f"{tool.schema_field}.type"
                raise invalid(
                    place,
                    f"{place} is {quoted(schema_type)}; it must be object, because arguments have "
                    "names",
                )
            nodes += count_nodes(tool.parameters, tool.schema_field)
        limits.check("tools", len(self.to_text().encode()) if self.tools else 0, nodes)
        self._check_choice(names)

    def _check_choice(self, names: set[str]) -> None:
        mode, name = self.choice.mode, self.choice.name
        if not self.tools and mode in ("required", "named"):
            raise invalid("tool_choice", "tool_choice asks for a call and needs tools; add them")
        if mode == "named" and name not in names:
            known = ", ".join(sorted(names))[:200]
            raise invalid("tool_choice", f"tool_choice names {quoted(name)}; tools are {known}")
        if self.max_calls is not None and self.max_calls < 1 and mode in ("required", "named"):
            raise invalid(
                "max_tool_calls",
                f"max_tool_calls is {self.max_calls} and tool_choice asks for a call",
            )

    def to_text(self) -> str:
        """The offered tools as JSON; empty if there are none."""
        offered = [tool.to_json() for tool in self.offered]
        return json.dumps(offered, ensure_ascii=False, separators=(",", ":")) if offered else ""


class _ArgumentTypes:
    """Finds the types of schemas, which may refer to definitions of the root."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._known: dict[str, frozenset[str]] = {}  # by reference

    def of(self, schema: Any, depth: int = 4) -> frozenset[str]:
        """The types that a schema names; an empty set if it allows any, or names them elsewhere."""
        if not isinstance(schema, dict) or depth == 0:
            return frozenset()
        given = schema.get("type")
        if isinstance(given, str):
            return frozenset({given})
        if isinstance(given, list):
            return frozenset(each for each in given if isinstance(each, str))
        if (found := definition_of(schema, self._root)) is not None:
            reference = schema["$ref"]
            if reference not in self._known:
                self._known[reference] = frozenset()  # in case the definition refers to itself
                self._known[reference] = self.of(found, depth - 1)
            return self._known[reference]
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                types = [self.of(each, depth - 1) for each in schema[key]]
                return frozenset().union(*types) if all(types) else frozenset()
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        texts = all(isinstance(each, str) for each in values)
        return frozenset({"string"}) if texts else frozenset()


def definition_of(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """The target of a `$ref` to the definitions of the root; None for any other schema."""
    reference = schema.get("$ref")
    found = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
    if found is None or not isinstance(root.get(found[1]), dict):
        return None
    return root[found[1]].get(found[2])
