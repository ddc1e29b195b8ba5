"""Downloads the files of a model from the Hugging Face hub into its cache on this machine.

Only files that a service reads are downloaded: the configuration, the tokenizer's files, chat
templates, and safetensors weights. Files in the cache are used without a request to the hub. So a
process that starts again needs no network and runs the same weights as before.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pagewire.models import HubId, hub_cache

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Names in the root of a repository. The `*` in these patterns also matches `/`.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model.v*",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "*_Pooling/config.json",
    "*_LogitScore/config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    INDEX,
)
# Unsupported formats of weights, for error messages.
_OTHER_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.onnx", "*.h5", "*.msgpack")
# Seconds between two lines about a download, and between two states of the bar.
_REPORT_INTERVAL = 10.0
_BAR_INTERVAL = 0.2
# Seconds without a write after which a partial file counts as abandoned.
_STALE_AFTER = 3600.0

Report = Callable[[str], None]


class DownloadError(Exception):
    """A model cannot be downloaded; the message has the reason and the remedy."""


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fetch_model(
    model: str, *, tokenizer: bool = True, weights: bool = True, report: Report = _print
) -> str:
    """Makes sure that the files of `model` are on this machine: its config.json, and its tokenizer
    and weights if they are needed.

    Returns `model` as it is, or, for a hub id, the id with the commit of the files. `report`
    receives lines about a download; a terminal shows a progress bar.

    Raises DownloadError. A `model` that is neither a folder nor `org/name` is returned: the service
    that reads it reports the error.
    """
    hub_id = HubId.of(model)
    if hub_id is None or "/" not in hub_id.name:
        return model
    folder = hub_id.cached_snapshot()
    if (
        folder is None
        or (weights and not _has_weights(folder))
        or (tokenizer and not _has_small_files(hub_id, folder))
    ):
        if _is_offline():
            raise DownloadError(
                f"{hub_id}: not all of its files are in the hub cache {hub_cache()}, and "
                "HF_HUB_OFFLINE is set; unset it, copy the files there, or give the path of a "
                "folder"
            )
        _remove_stale_parts(hub_id)
        folder = _download(hub_id, folder, weights, report)
    return f"{hub_id.name}@{folder.name}"


def _has_small_files(hub_id: HubId, folder: Path) -> bool:
    """Whether a snapshot in the cache has all small files of its commit.

    The cache of an old release of huggingface_hub does not list a commit's files. Offline, its
    snapshot counts as complete.
    """
    # Imported here: the import takes a third of a second, and local models do not need it.
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    place: dict[str, Any] = {"cache_dir": hub_cache(), "revision": folder.name}
    try:
        get_cached_repo_tree(hub_id.name, **place)
        snapshot_download(
            hub_id.name, **place, allow_patterns=list(SMALL_FILES), local_files_only=True
        )
    except LocalEntryNotFoundError:
        return False
    except CachedRepoTreeNotFoundError:
        return _is_offline()
    return True


def _download(hub_id: HubId, begun: Path | None, weights: bool, report: Report) -> Path:
    """Downloads the files of `hub_id`; of the commit of `begun`, which already has some of them."""
    from huggingface_hub.errors import RevisionNotFoundError

    report(f"downloading {hub_id} from {_endpoint()}")
    started = time.monotonic()
    folder = None
    try:
        if begun is not None and begun.name != hub_id.revision:
            with suppress(RevisionNotFoundError):  # the branch may have been rewritten
                folder = _files(HubId(hub_id.name, begun.name), weights, report)
        folder = folder or _files(hub_id, weights, report)
    except DownloadError:
        raise
    except Exception as error:  # of the network, the hub or the disk, in many classes
        raise DownloadError(_explain(error, hub_id)) from error
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    report(
        f"{hub_id} is in {folder}: {_size(size)} after {time.monotonic() - started:.1f} s of "
        "downloading"
    )
    return folder


def _files(hub_id: HubId, weights: bool, report: Report) -> Path:
    """Downloads missing files. Raises DownloadError and huggingface_hub's errors."""
    folder = _snapshot(hub_id, list(SMALL_FILES))
    if not (folder / "config.json").is_file():
        raise DownloadError(
            f"{hub_id} has no config.json at {_endpoint()}; give a model in the format of "
            "transformers"
        )
    if weights:
        names = _weight_files(folder) or [SINGLE]
        with _progress(folder, names, hub_id, report):
            _snapshot(HubId(hub_id.name, folder.name), names)
        if not _has_weights(folder):
            raise DownloadError(_no_weights(hub_id, folder))
    return folder


def _remove_stale_parts(hub_id: HubId) -> None:
    """Removes partial files of killed processes; no download continues them."""
    for part in (hub_id.cache_folder() / "blobs").glob("*.incomplete"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > _STALE_AFTER:
                part.unlink()


def _snapshot(hub_id: HubId, patterns: list[str]) -> Path:
    """Downloads the files that match; complete files in the cache stay as they are."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    with disable_progress_bars():
        folder = snapshot_download(
            hub_id.name,
            revision=hub_id.revision,
            cache_dir=hub_cache(),
            endpoint=_endpoint(),
            allow_patterns=patterns,
            library_name="pagewire",
            library_version=version("pagewire"),
        )
    return Path(folder)


def _weight_files(folder: Path) -> list[str]:
    """The shards that the index names; empty without an index."""
    path = folder / INDEX
    if not path.is_file():
        return []
    try:
        return sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DownloadError(f"{path} is not an index of safetensors files") from error


def _has_weights(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _weight_files(folder) or [SINGLE])


@contextmanager
def _progress(folder: Path, names: list[str], hub_id: HubId, report: Report) -> Iterator[None]:
    """A progress bar on standard error if that is a terminal, else a line every few seconds.

    It reads the sizes of the files. huggingface_hub's own bars would stay on the terminal.
    """
    sizes = _sizes(hub_id.name, folder.name)
    total = sum(sizes.get(name, 0) for name in names)
    blobs = folder.parents[1] / "blobs"
    ended = threading.Event()

    def loaded() -> int:
        whole = sum(sizes.get(name, 0) for name in names if (folder / name).is_file())
        return min(total, whole + sum(map(_size_of, blobs.glob("*.incomplete"))))

    def follow(seconds: float, show: Callable[[int], object]) -> None:
        while not ended.wait(seconds):
            show(loaded())

    with ExitStack() as stack:
        if sys.stderr.isatty():
            bar = stack.enter_context(_bar())
            task = bar.add_task("weights", total=total)
            shown = (_BAR_INTERVAL, lambda size: bar.update(task, completed=size))
        else:
            of_total = _size(total)
            shown = (
                _REPORT_INTERVAL,
                lambda size: report(f"downloading {hub_id}: {_size(size)} of {of_total}"),
            )
        thread = threading.Thread(target=follow, args=shown, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # it is complete now


def _sizes(name: str, commit: str) -> dict[str, int]:
    """Bytes of each file of a commit, from the list that the download stored."""
    from huggingface_hub import get_cached_repo_tree

    return {
        file.path: file.size
        for file in get_cached_repo_tree(name, revision=commit, cache_dir=hub_cache())
    }


def _no_weights(hub_id: HubId, folder: Path) -> str:
    names = _sizes(hub_id.name, folder.name)
    missing = [name for name in _weight_files(folder) if name not in names]
    if missing:
        return f"{hub_id}: {missing[0]} is missing at {_endpoint()}, which its {INDEX} names"
    others = [name for name in names if any(fnmatch(name, p) for p in _OTHER_WEIGHTS)]
    has = f" (it has {', '.join(sorted(others)[:3])})" if others else ""
    return (
        f"{hub_id} has neither {SINGLE} nor {INDEX} at {_endpoint()}{has}; only safetensors "
        "weights are read: choose a repository or a revision that has them"
    )


def _explain(error: Exception, hub_id: HubId) -> str:
    """The reason of a failed download and the remedy, from huggingface_hub's errors."""
    from huggingface_hub import errors as hub
    from huggingface_hub import get_token

    if isinstance(error, hub.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of the call that failed before the cache was searched
    endpoint = _endpoint()
    status = error.response.status_code if isinstance(error, hub.HfHubHTTPError) else None
    has_token = get_token() is not None
    if isinstance(error, hub.GatedRepoError):
        token = "of that account" if not has_token else "of an account that has access"
        return (
            f"{hub_id} is gated: ask for access at {endpoint}/{hub_id.name}, and set HF_TOKEN to a "
            f"token {token}"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return (
            f"{hub_id.name} has no revision {hub_id.revision!r} at {endpoint}; give a branch, a "
            "tag or a whole commit hash after the @"
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        token = "the account of HF_TOKEN has no access" if has_token else "HF_TOKEN is not set"
        return (
            f"there is no folder {hub_id.name} with a config.json, and no model of this name at "
            f"{endpoint}, or it is private and {token}; check the name and the token"
        )
    if status == 401:
        return f"{endpoint} refuses the token in HF_TOKEN (401); set a valid one, or unset it"
    if status == 403:
        return (
            f"{endpoint} forbids {hub_id.name} for the token in HF_TOKEN (403); give it the right "
            "to read this model"
        )
    if status is not None:
        return f"{endpoint} answers {status} for {hub_id.name}; try again later: {_line(error)}"
    if isinstance(error, OSError) and error.errno is not None:
        return (
            f"{hub_id} cannot be stored in {hub_cache()}: {_line(error)}; make room there or set "
            "HF_HOME to another folder"
        )
    return (
        f"{hub_id} cannot be downloaded from {endpoint}: {_line(error)}; check the network and "
        "HF_ENDPOINT and try again (complete files are kept), or give the path of a folder"
    )


def _line(error: Exception) -> str:
    """The first line of an error's text, or its class."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _is_offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
