"""The folder of a model's files, and its name in requests."""

import os
from pathlib import Path

EMBEDDED = "embedded"
EMBEDDED_NAME = "pagewire-chat"


def resolve_model(model: str) -> Path:
    """The folder of a model given as a path, a cached Hugging Face hub id, or `embedded`.

    FileNotFoundError names the places that were searched. Nothing is downloaded.
    """
    if model == EMBEDDED:
        return Path(__file__).parent / "embedded" / "model"
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder
    cached = _cached_snapshot(model)
    if cached is not None:
        return cached
    raise FileNotFoundError(
        f"model {model!r}: no folder with a config.json at {folder.absolute()} and no such model "
        f"in the hub cache {_hub_cache()}; give the path of a folder in Hugging Face format"
    )


def served_name(model: str, given: str | None) -> str:
    """The name of a model in requests: the given one, else one that follows from its path."""
    if given:
        return given
    return EMBEDDED_NAME if model == EMBEDDED else Path(model).name


def _hub_cache() -> Path:
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    return Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")) / "hub"


def _cached_snapshot(model: str) -> Path | None:
    """The snapshot of a hub id that `refs/main` names in the hub's cache."""
    repo = _hub_cache() / f"models--{model.replace('/', '--')}"
    ref = repo / "refs" / "main"
    if not ref.is_file():
        return None
    snapshot = repo / "snapshots" / ref.read_text().strip()
    return snapshot if (snapshot / "config.json").is_file() else None
