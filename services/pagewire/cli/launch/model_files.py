"""Downloads the files of a model before the services that read them start."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pagewire.cli.errors import CommandError
from pagewire.hub import DownloadError, fetch_model
from pagewire.json_files import read_json_object
from pagewire.models import read_chat_template, resolve_model, resolve_tokenizer

_JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")


def with_model_files(
    values: Mapping[str, Any], *, tokenizer: bool = True, weights: bool = True
) -> dict[str, Any]:
    """The settings with the commits of hub ids, after a download of missing files.

    `tokenizer` and `weights`: whether these are needed, unless the settings turn them off.
    CommandError if files are not available, or the file of a chat template cannot be read.
    """
    check_chat_template(values)
    given = values.get("tokenizer")
    skipped = values.get("skip_tokenizer", False)
    tokenizer &= not skipped
    weights &= values.get("load_format") != "dummy" and values.get("backend") != "command"
    try:
        model = fetch_model(values["model"], tokenizer=tokenizer and not given, weights=weights)
        if given and not skipped and not Path(given).expanduser().is_dir():
            given = fetch_model(given, weights=False)
        draft = values.get("draft_model")
        if draft is not None:
            draft = fetch_model(draft, tokenizer=False, weights=weights)
    except DownloadError as error:
        raise CommandError(str(error)) from error
    fetched = {"model": model, "tokenizer": given, "draft_model": draft}
    return {**values, **{name: fetched[name] for name in fetched if name in values}}


def check_chat_template(values: Mapping[str, Any]) -> None:
    """CommandError if the chat template in the settings is not a readable file.

    Otherwise the scheduler would report this, but only after downloads and while workers load.
    """
    file = values.get("chat_template")
    if file is not None and not values.get("skip_tokenizer", False):  # they exclude each other
        try:
            read_chat_template(file)
        except ValueError as error:
            raise CommandError(str(error)) from error


def check_model(values: Mapping[str, Any]) -> None:
    """CommandError if the model, its tokenizer or its draft model is not on this machine, or one of
    the model's JSON files is malformed.

    Otherwise each service would find and report this itself.
    """
    try:
        folder = resolve_model(values["model"])
        for name in _JSON_FILES:
            if (folder / name).is_file():
                read_json_object(folder / name)
    except FileNotFoundError as error:
        raise CommandError(
            f"{error}. `pagewire run --model Qwen/Qwen3-0.6B` downloads that model; without "
            "--model the one that comes with Pagewire is served"
        ) from error
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    tokenizer, draft = values.get("tokenizer"), values.get("draft_model")
    if tokenizer is not None and not values.get("skip_tokenizer", False):
        _check_found("--tokenizer", partial(resolve_tokenizer, values["model"], tokenizer))
    if draft is not None:
        _check_found("--draft-model", partial(resolve_model, draft))


def _check_found(flag: str, resolve: Callable[[], object]) -> None:
    try:
        resolve()
    except FileNotFoundError as error:
        raise CommandError(f"{flag}: {error}") from error
