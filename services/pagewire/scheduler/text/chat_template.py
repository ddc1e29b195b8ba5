"""Chat templates: a model's Jinja template turns a conversation into its prompt text.

Templates come with model files, so they run in Jinja's immutable sandbox.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagewire.errors import invalid

Message = dict[str, Any]


class _GenerationBlock(Extension):
    """Prints `{% generation %}` blocks, which mark the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The template of one model; `render` may be called from any thread."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """`special_tokens` are variables such as `bos_token`. ValueError if it does not parse."""
        self.sources = {"default": source}
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ValueError(f"the model's chat template does not parse: {error}") from error
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a model folder, from chat_template.jinja or tokenizer_config.json."""
        config = _read_json(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = next((t["template"] for t in source if t.get("name") == "default"), None)
        return None if source is None else cls(source, _special_tokens(config))

    def render(
        self, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any]
    ) -> str:
        """The prompt text; RequestError with the template's own message if it raises an error."""
        try:
            return self._template.render(
                **(self._special_tokens | variables),
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # the template computes with the client's values only
            raise invalid(
                "messages", f"the model's chat template refuses these messages: {error}"
            ) from error


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token") and value is not None:
            content = value["content"] if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
