"""Reads weights from safetensors files in the Hugging Face layout, one file or several."""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire.json_files import read_json_object
from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.progress import progress
from pagewire.worker.model.quantization.loading import QuantizedLayers
from pagewire.worker.model.quantization.parts import QuantizedPart
from pagewire.worker.model.quantization.stored import PLAIN, StoredTensor
from pagewire.worker.model.served_weights import served_weights
from pagewire.worker.model.weight_names import named_views
from pagewire.worker.model.weights import Weights, empty_weights, quantized_parts

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Tensors that older exporters stored although the configuration determines them.
_DERIVED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
# Static scales of an FP8 KV cache; the worker uses scales of its own (`fp8.take_kv_cache`).
_KV_SCALES = (".self_attn.k_scale", ".self_attn.v_scale")


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    further: Mapping[str, Tensor] = MappingProxyType({}),
) -> Weights:
    """The weights in `folder`, converted to `dtype`, on `device`.

    Quantized layers keep their values; the scales of grouped layers have the type `dtype`.
    `further` are more tensors to fill, by name: those of a head that is not the decoder's.

    Raises:
        SetupError: names a file that cannot be read, or a tensor that is missing, unknown to the
            model, or of the wrong shape, type or value.
    """
    weights = empty_weights(config, dtype, device)
    views, parts = {**named_views(config, weights), **further}, quantized_parts(config, weights)
    fill_views(folder, config, views, dtype, parts)
    return served_weights(config, weights)


def fill_views(
    folder: Path,
    config: ModelConfig,
    views: dict[str, Tensor],
    dtype: torch.dtype,
    parts: dict[str, QuantizedPart] | None = None,
) -> None:
    """Copies the tensors in `folder` to `views` by name, and to quantized layers `parts`.

    `dtype` and SetupError as in `load_weights`.
    """
    files, parts = weight_files(folder), parts or {}
    names = _Names(config, views, parts)
    owners = _owners(files, names)
    places = _Places(views, QuantizedLayers(parts, dtype, owners.keys()), names)
    places.check_complete(folder, owners.keys())
    with progress("loading weights", sum(path.stat().st_size for path in files)) as advance:
        for path in files:
            _fill(path, places, owners, advance)


def plain_tensors(files: list[Path], config: ModelConfig) -> dict[Path, list[str]]:
    """The names of the tensors that the model needs from each file; each is in one file only.

    `files` have the weights of a model that is not quantized. No values are read.

    Raises:
        SetupError: a tensor is missing, unknown, or of the wrong shape or type.
    """
    weights = empty_weights(config, torch.bfloat16, torch.device("meta"))
    views = named_views(config, weights)
    names = _Names(config, views, {})
    places = _Places(views, QuantizedLayers({}, torch.bfloat16, ()), names)
    owners = _owners(files, names)
    places.check_complete(files[0].parent, owners.keys())
    needed = {}
    for path in files:
        with opened(path) as file:
            needed[path] = [name for name, _ in _needed(file, path, places, owners)]
    return needed


def weight_files(folder: Path) -> list[Path]:
    """The files of the checkpoint, sorted: those that its index names, else the single file."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise SetupError(
                f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors weights are read, "
                "and --load-format dummy needs none"
            )
        return [folder / SINGLE]
    files = [folder / name for name in sorted(set(_weight_map(folder / INDEX).values()))]
    for path in files:
        if not path.is_file():
            raise SetupError(f"{path} is missing, which {INDEX} names; complete the checkpoint")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """The name of each tensor's file in an index; SetupError if it is none, or names no file."""
    try:
        places = read_json_object(index).get("weight_map")
    except OSError as error:
        raise SetupError(f"{index} cannot be read: {error}") from error
    except ValueError as error:
        raise SetupError(f"{error}; complete the checkpoint") from error
    given = places if isinstance(places, dict) else {}
    names = given.values()
    if not names or not all(_is_file_name(name) for name in names):
        raise SetupError(
            f"{index} is not an index of safetensors files: its weight_map must name the file of "
            "each tensor; complete the checkpoint"
        )
    return given


def _is_file_name(name: object) -> bool:
    """Whether a value of an index may be the name of a file."""
    return isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= 255


def _owners(files: list[Path], names: "_Names") -> dict[str, Path]:
    """The file of each tensor, by common name.

    The index decides between two files that have the same tensor. SetupError if it does not name
    the tensor, or if a file has a tensor by two names.
    """
    owners: dict[str, Path] = {}
    chosen: dict[str, str] = {}  # the index, once two files have the same tensor
    for path in files:
        seen: dict[str, str] = {}
        with opened(path) as file:
            for stored in file.keys():  # noqa: SIM118, a safetensors file does not iterate
                name = names.usual(stored)
                if name is None:
                    continue
                if (other := seen.setdefault(name, stored)) != stored:
                    raise SetupError(
                        f"{path}: {other} and {stored} name the same tensor; remove one of them"
                    )
                first = owners.setdefault(name, path)
                if first is path:
                    continue
                chosen = chosen or _weight_map(path.parent / INDEX)
                if stored not in chosen:
                    raise SetupError(
                        f"tensor {stored} is in {first} and in {path}; remove it from one file"
                    )
                if path.parent / chosen[stored] == path:
                    owners[name] = path
    return owners


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An open safetensors file; SetupError if it cannot be read as such."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise SetupError(f"{path} cannot be read as safetensors: {error}") from error


class _Names:
    """The names of a checkpoint's tensors, and which tensors no model needs."""

    def __init__(
        self, config: ModelConfig, views: Container[str], parts: Mapping[str, QuantizedPart]
    ) -> None:
        self._config = config
        self._views = views
        self._parts = parts
        quantization = config.quantization
        self._mxfp4 = quantization is not None and quantization.method == "mxfp4"

    def usual(self, name: str) -> str | None:
        """The common name of a tensor in all families; None for a tensor that is never needed.

        A dot stands before `blocks` and `scales` of MXFP4, as before other parts of a layer.
        """
        usual = self._config.names.canonical(name)
        if usual is not None and self._mxfp4:
            usual = re.sub(r"_(blocks|scales)$", r".\1", usual)
        # A decoder that was saved without a head has names without the first part.
        whole = f"model.{usual}"
        return (
            whole if usual is not None and not self._known(usual) and self._known(whole) else usual
        )

    def may_be_left_out(self, name: str) -> bool:
        """Whether the model does not need a tensor without a place."""
        if name.endswith(_DERIVED):
            return True
        if self._config.tied_head and name.startswith("lm_head.") and not name.endswith(".bias"):
            return True
        quantization = self._config.quantization
        if quantization is not None and quantization.fp8_kv and name.endswith(_KV_SCALES):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        later = layer is not None and int(layer[1]) >= self._config.num_layers
        return later and self._config.names.later_layers

    def _known(self, name: str) -> bool:
        return name in self._views or name.rpartition(".")[0] in self._parts


@dataclass(frozen=True, slots=True)
class _Places:
    """The targets of a checkpoint's tensors in the weights."""

    views: dict[str, Tensor]
    layers: QuantizedLayers
    names: _Names

    def check_complete(self, folder: Path, present: Set[str]) -> None:
        """Raises SetupError for a tensor that the model needs and no file has."""
        needed = {name: tuple(view.shape) for name, view in self.views.items()}
        needed |= dict(self.layers.names())
        missing = [name for name in needed if name not in present]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            shape = list(needed[missing[0]])
            raise SetupError(f"{folder}: tensor {missing[0]} {shape} is missing{more}")

    def wants(self, name: str) -> StoredTensor | None:
        """The required shapes and types of a tensor; None if it has no place."""
        view = self.views.get(name)
        if view is not None:
            return StoredTensor((tuple(view.shape),), PLAIN)
        return self.layers.wants(name)

    def put(self, name: str, tensor: Tensor) -> None:
        """Copies a tensor to its place."""
        if name in self.views:
            self.views[name].copy_(tensor)
        else:
            self.layers.take(name, tensor)


def _fill(
    path: Path, places: _Places, owners: dict[str, Path], advance: Callable[[int], None]
) -> None:
    """Copies every needed tensor of one file to its place."""
    with opened(path) as file:
        for name, usual in _needed(file, path, places, owners):
            tensor = file.get_tensor(name)
            places.put(usual, tensor)
            advance(tensor.nbytes)


def _needed(
    file: Any, path: Path, places: _Places, owners: dict[str, Path]
) -> Iterator[tuple[str, str]]:
    """The stored and the common name of each tensor that the model needs from an open file.

    Tensors that `owners` has elsewhere are left out. SetupError if a tensor is wrong or unknown.
    """
    for name in file.keys():  # noqa: SIM118, a safetensors file does not iterate
        usual = _wanted(path, name, file, places)
        if usual is not None and owners[usual] == path:
            yield name, usual


def _wanted(path: Path, name: str, file: Any, places: _Places) -> str | None:
    """Checks a tensor and returns its common name; None if it is not needed.

    SetupError if it is wrong or unknown.
    """
    usual = places.names.usual(name)
    if usual is None:
        return None
    wanted = places.wants(usual)
    if wanted is None:
        zeros = places.layers.may_have_bias(usual) and not bool(file.get_tensor(name).any())
        if zeros or places.names.may_be_left_out(usual):
            return None
        raise SetupError(
            f"{path}: tensor {name} has no place in the model that config.json describes; "
            "use the config.json and the weights of the same checkpoint"
        )
    part = file.get_slice(name)
    _check(path, name, part.get_shape(), part.get_dtype(), wanted)
    return usual


def _check(path: Path, name: str, shape: list[int], dtype: str, wanted: StoredTensor) -> None:
    if tuple(shape) not in wanted.shapes:
        needed = " or ".join(str(list(one)) for one in wanted.shapes)
        raise SetupError(f"{path}: tensor {name} has shape {shape}, config.json needs {needed}")
    if dtype not in wanted.dtypes:
        raise SetupError(
            f"{path}: tensor {name} is of type {dtype}; supported are {', '.join(wanted.dtypes)}"
        )
