"""Brings the files of a model to this machine before the services that read them start."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewire.cli.errors import CommandError
from pagewire.hub import DownloadError, fetch_model


def with_model_files(
    values: Mapping[str, Any], *, tokenizer: bool = True, weights: bool = True
) -> dict[str, Any]:
    """The settings with the commits of hub ids, after a download of what is missing of them.

    `tokenizer` and `weights` say whether these are needed, unless the settings turn them off.
    CommandError if the files cannot be had.
    """
    given = values.get("tokenizer")
    skipped = values.get("skip_tokenizer", False)
    tokenizer &= not skipped
    weights &= values.get("load_format") != "dummy" and values.get("backend") != "command"
    try:
        model = fetch_model(values["model"], tokenizer=tokenizer and not given, weights=weights)
        if given and not skipped and not Path(given).expanduser().is_dir():
            given = fetch_model(given, weights=False)
    except DownloadError as error:
        raise CommandError(str(error)) from error
    fetched = {"model": model, "tokenizer": given}
    return {**values, **{name: fetched[name] for name in fetched if name in values}}
