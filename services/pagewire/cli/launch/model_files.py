"""Brings the files of a model to this machine before the services that read them start."""

from collections.abc import Mapping
from typing import Any

from pagewire.cli.errors import CommandError
from pagewire.hub import DownloadError, fetch_model


def with_model_files(
    values: Mapping[str, Any], *, tokenizer: bool = True, weights: bool = True
) -> dict[str, Any]:
    """The settings with the model's commit, after a download of what is missing of a hub id.

    `tokenizer` and `weights` say whether these are needed, unless the settings turn them off.
    CommandError if the files cannot be had.
    """
    tokenizer &= not values.get("skip_tokenizer", False)
    weights &= values.get("load_format") != "dummy"
    try:
        model = fetch_model(values["model"], tokenizer=tokenizer, weights=weights)
    except DownloadError as error:
        raise CommandError(str(error)) from error
    return {**values, "model": model}
