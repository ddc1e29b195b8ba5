"""Finds the chat templates of a model, in the order in which transformers looks for them."""

from pathlib import Path
from typing import Any

from pagewire.json_files import read_json_object
from pagewire.models import read_chat_template
from pagewire.scheduler.text.chat_template import DEFAULT, ChatTemplate

_FILE = "chat_template.jinja"
_NAMED_FILES = "additional_chat_templates/*.jinja"
# A template of processors, which multimodal models have beside their tokenizer.
_PROCESSOR_FILE = "chat_template.json"


def load_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """The templates of a model's folder, or the one in `file`; None if the model has none.

    Files of templates come before those in tokenizer_config.json. ValueError for a template that
    does not parse or is no text, and for a `file` that cannot be read.
    """
    variables = special_tokens(folder)
    if file is not None:
        return ChatTemplate(read_chat_template(file), variables)
    sources = _sources(folder)
    return ChatTemplate(sources, variables) if sources else None


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens of a model's folder that have names, such as `bos_token`."""
    tokens = _named_tokens(_read_json(folder / "special_tokens_map.json"))
    return tokens | _named_tokens(_read_json(folder / "tokenizer_config.json"))


def _sources(folder: Path) -> dict[str, str]:
    """Templates by name."""
    sources: dict[Any, Any] = {}
    given = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if given is None:
        given = _read_json(folder / _PROCESSOR_FILE).get("chat_template")
    if isinstance(given, str):
        sources[DEFAULT] = given
    elif isinstance(given, list) and all(isinstance(each, dict) for each in given):
        sources |= {each.get("name"): each.get("template") for each in given}
    elif isinstance(given, dict):
        sources |= given
    elif given is not None:
        sources[DEFAULT] = given
    if not all(isinstance(one, str) for pair in sources.items() for one in pair):
        raise ValueError(
            f"{folder}: chat_template must be a text, or texts with names; correct it in "
            f"tokenizer_config.json or {_PROCESSOR_FILE}, or give --chat-template"
        )
    if (folder / _FILE).is_file():
        sources = {DEFAULT: (folder / _FILE).read_text(encoding="utf-8")}
    named = sorted(folder.glob(_NAMED_FILES))
    return sources | {path.stem: path.read_text(encoding="utf-8") for path in named}


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token") and value is not None:
            content = value["content"] if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
