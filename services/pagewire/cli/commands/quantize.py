"""`pagewire quantize`: a quantized copy of a model folder."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from pagewire.cli.errors import CommandError

_SMALLEST_GROUP = 16


def quantize(
    model: Annotated[str, typer.Argument(help="Model folder, id at the hub, or `embedded`.")],
    to: Annotated[
        Literal["fp8", "int8", "int4"],
        typer.Option(help="Format of the weights. Inputs get the same one, but with int4 none."),
    ],
    output: Annotated[Path, typer.Option(help="Folder to write, which must not exist.")],
    group_size: Annotated[
        int | None,
        typer.Option(
            help="With int4, the inputs that share a scale: a power of two from 16; by default 128."
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Text file in UTF-8: round so that outputs for such texts change little. It runs "
            "the model on the CPU. By default values are rounded to the nearest."
        ),
    ] = None,
) -> None:
    """Write a copy of a model with quantized weights, in the format of compressed-tensors.

    All linear layers but the head are quantized. The folder appears when it is complete.
    """
    if group_size is not None and to != "int4":
        raise typer.BadParameter(
            f"{to} has a scale for each channel; leave it out", param_hint="--group-size"
        )
    size = 128 if group_size is None else group_size
    if size < _SMALLEST_GROUP or size & (size - 1):
        raise typer.BadParameter(
            f"{size} is not a power of two of at least {_SMALLEST_GROUP}", param_hint="--group-size"
        )
    try:
        from pagewire.models import resolve_model
        from pagewire.worker.errors import SetupError
        from pagewire.worker.quantizing.folder import quantize_folder
    except ImportError as error:
        raise CommandError(
            f"{error}: install the extra `worker`, pip install -e '.[worker]' in the repository"
        ) from error
    try:
        before, after = quantize_folder(resolve_model(model), output, to, size, calibrate)
    except (SetupError, OSError) as error:
        raise CommandError(str(error)) from error
    print(f"{output}: {after / 1e9:.3f} GB of weights in {to}, of {before / 1e9:.3f} GB")
