"""Reads weights from safetensors files in the Hugging Face layout, one file or several."""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.served_weights import served_weights
from pagewire.worker.model.weight_names import named_views
from pagewire.worker.model.weights import Weights, empty_weights

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_READABLE = ("F32", "F16", "BF16")
# Tensors that older exporters stored although the configuration determines them.
_DERIVED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    further: Mapping[str, Tensor] = MappingProxyType({}),
) -> Weights:
    """The weights in `folder`, converted to `dtype`, on `device`.

    `further` are tensors by name that are filled, too: those of a head that is not the decoder's.

    Raises:
        SetupError: names a file that cannot be read, or a tensor that is missing, unknown to the
            model, or of the wrong shape or type.
    """
    weights = empty_weights(config, dtype, device)
    views = {**named_views(config, weights), **further}
    files = _files(folder)
    missing = dict(views)
    with _progress(sum(path.stat().st_size for path in files)) as advance:
        for path in files:
            for name in _fill(path, views, config, advance):
                missing.pop(name, None)
    if missing:
        name, view = next(iter(missing.items()))
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SetupError(f"{folder}: tensor {name} {list(view.shape)} is missing{more}")
    return served_weights(config, weights)


def _files(folder: Path) -> list[Path]:
    """The files of the checkpoint, sorted: those that its index names, else the single file."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise SetupError(
                f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors weights are read, "
                "and --load-format dummy needs none"
            )
        return [folder / SINGLE]
    try:
        shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise SetupError(f"{folder / INDEX} is not an index of safetensors files") from error
    files = [folder / name for name in sorted(set(shards))]
    for path in files:
        if not path.is_file():
            raise SetupError(f"{path} is missing, which {INDEX} names; complete the checkpoint")
    return files


def _fill(
    path: Path, views: dict[str, Tensor], config: ModelConfig, advance: Callable[[int], None]
) -> Iterator[str]:
    """Copies every tensor of one file into its view, and yields the tensors' usual names."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118, a safetensors file does not iterate
                usual = _usual_name(name, views, config)
                view = None if usual is None else _view(path, usual, views, config)
                if usual is None or view is None:
                    continue
                part = file.get_slice(name)
                _check(path, name, part.get_shape(), part.get_dtype(), view)
                view.copy_(file.get_tensor(name))
                advance(view.numel() * (4 if part.get_dtype() == "F32" else 2))
                yield usual
    except (SafetensorError, OSError) as error:
        raise SetupError(f"{path} cannot be read as safetensors: {error}") from error


def _usual_name(name: str, views: dict[str, Tensor], config: ModelConfig) -> str | None:
    """The name of a tensor that all families use; None for one that is never needed."""
    usual = config.names.canonical(name)
    # A decoder that was saved without a head has names without the first part.
    whole = f"model.{usual}"
    return whole if usual not in views and whole in views else usual


def _view(path: Path, name: str, views: dict[str, Tensor], config: ModelConfig) -> Tensor | None:
    """The view that a tensor is copied into; None for a tensor that is not needed."""
    if name in views:
        return views[name]
    if name.endswith(_DERIVED) or (config.tied_head and name == "lm_head.weight"):
        return None
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if config.names.later_layers and layer and int(layer[1]) >= config.num_layers:
        return None
    raise SetupError(
        f"{path}: tensor {name} has no place in the model that config.json describes; "
        "use the config.json and the weights of the same checkpoint"
    )


def _check(path: Path, name: str, shape: list[int], dtype: str, view: Tensor) -> None:
    if list(shape) != list(view.shape):
        raise SetupError(
            f"{path}: tensor {name} has shape {list(shape)}, config.json needs {list(view.shape)}"
        )
    if dtype not in _READABLE:
        raise SetupError(
            f"{path}: tensor {name} is of type {dtype}; supported are {', '.join(_READABLE)}"
        )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error if that is a terminal, else one log line.

    Yields a function that takes the number of bytes loaded since its last call.
    """
    if not sys.stderr.isatty():
        log.info("loading weights, %.2f GB", total / 1e9)
        yield lambda done: None
        return
    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=total)
        yield lambda done: bar.advance(task, done)
