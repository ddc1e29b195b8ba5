"""The folder of a model's files, and its name in requests."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pagewire.json_files import read_json_object

EMBEDDED = "embedded"
EMBEDDED_NAME = "pagewire-chat"

DEFAULT_REVISION = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The organization may be missing, as in the hub's oldest models.
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[\w-][\w./-]*")


@dataclass(frozen=True, slots=True)
class HubId:
    """The id of a model on the Hugging Face hub, `org/name`, and its branch, tag or commit."""

    name: str
    revision: str = DEFAULT_REVISION

    @classmethod
    def of(cls, model: str) -> "HubId | None":
        """Parses `model` as `org/name` or `org/name@revision`.

        None for `embedded`, for an existing folder, and for any other text.
        """
        if model == EMBEDDED or (Path(model).expanduser() / "config.json").is_file():
            return None
        name, separator, revision = model.partition("@")
        if _HUB_ID.fullmatch(name) is None:
            return None
        if not separator:
            return cls(name)
        valid = _REVISION.fullmatch(revision) is not None and ".." not in revision
        return cls(name, revision) if valid else None

    def __str__(self) -> str:
        suffix = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return self.name + suffix

    def cache_folder(self) -> Path:
        """The folder of all revisions in the hub's cache."""
        return hub_cache() / f"models--{self.name.replace('/', '--')}"

    def cached_snapshot(self) -> Path | None:
        """The folder of this revision in the hub's cache. Some files may be missing."""
        repo = self.cache_folder()
        commit = self.revision
        if _COMMIT.fullmatch(commit) is None:
            ref = repo / "refs" / self.revision
            if not ref.is_file():
                return None
            commit = ref.read_text().strip()
        snapshot = repo / "snapshots" / commit
        return snapshot if (snapshot / "config.json").is_file() else None


def resolve_model(model: str) -> Path:
    """The folder of a model given as a path, a cached Hugging Face hub id, or `embedded`.

    FileNotFoundError names the searched places. It downloads nothing; `pagewire.hub` does.
    """
    if model == EMBEDDED:
        return Path(__file__).parent / "embedded" / "model"
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder
    hub_id = HubId.of(model)
    cached = None if hub_id is None else hub_id.cached_snapshot()
    if cached is not None:
        return cached
    if (folder / "adapter_config.json").is_file():
        raise FileNotFoundError(
            f"model {model!r}: {folder.absolute()} has an adapter without its model; merge it into "
            "the model, and give that folder"
        )
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        raise FileNotFoundError(
            f"model {model!r}: GGUF files are not supported; give the folder of the model in "
            "Hugging Face format"
        )
    raise FileNotFoundError(
        f"model {model!r}: no folder with a config.json at {folder.absolute()} and no such model "
        f"in the hub cache {hub_cache()}; give the path of a folder in Hugging Face format, or the "
        "id of a model at the hub as org/name or org/name@revision"
    )


def resolve_tokenizer(model: str, tokenizer: str | None) -> Path:
    """The folder of a model's tokenizer: the model's, unless `tokenizer` names another model or a
    folder, which then needs no config.json."""
    if tokenizer is None:
        return resolve_model(model)
    folder = Path(tokenizer).expanduser()
    return folder if folder.is_dir() else resolve_model(tokenizer)


def served_name(model: str, given: str | None) -> str:
    """The name of a model in requests: the given one, else one derived from `model`.

    The derived name is the hub id without its revision, or the last part of a path.
    """
    if given:
        return given
    if model == EMBEDDED:
        return EMBEDDED_NAME
    hub_id = HubId.of(model)
    return Path(model).name if hub_id is None else hub_id.name


def read_chat_template(file: str | Path) -> str:
    """The text of the file that the setting `chat_template` names; ValueError if it has none."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ValueError(
            f"--chat-template {file} cannot be read: {reason}; give a file with a Jinja template, "
            "or leave it out, and the model's own is used"
        ) from error


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids: those of generation_config.json, otherwise those of config.json.

    ValueError names the file if they cannot be ids of tokens.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            ids = read_json_object(path).get("eos_token_id")
            if ids is not None:
                found = tuple(ids) if isinstance(ids, list) else (ids,)
                if not all(type(one) is int and 0 <= one < 1 << 31 for one in found):
                    raise ValueError(
                        f"{path}: eos_token_id is {ids!r}; it must be the id of a token, a list of "
                        "ids, or null"
                    )
                return found
    return ()


def hub_cache() -> Path:
    """The folder in which huggingface_hub keeps the files of models."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return (Path(os.environ.get("HF_HOME") or default) / "hub").expanduser()
