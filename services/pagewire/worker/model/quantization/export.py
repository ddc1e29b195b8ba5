"""Writes quantized copies of model folders, in the format of compressed-tensors.

Names, shapes and types are those of the library compressed-tensors, so other engines can read the
folders.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pagewire.json_files import read_json_object
from pagewire.worker.errors import SetupError
from pagewire.worker.model.quantization.packing import pack, unpack_runs
from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.model.quantization.scheme import Fp8Scheme, GroupedScheme, Int8Scheme, Scheme
from pagewire.worker.ops.contract.quantized import QuantizedWeight, ScaledWeight

Target = Literal["fp8", "int8", "int4"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FORMATS = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers to quantize, by name, with their numbers of inputs and their quantization.

    `plain` has the ends of names of linear layers that stay plain. `done` has the tensors of layers
    that are quantized already. Values of all other layers are rounded to the nearest.
    """

    columns: Mapping[str, int]
    target: Target
    group: int
    plain: tuple[str, ...] = ()
    done: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def scheme(self) -> Scheme:
        """The scheme of all layers."""
        if self.target == "fp8":
            return Fp8Scheme()
        if self.target == "int8":
            return Int8Scheme()
        return GroupedScheme(bits=4, group=self.group, symmetric=True)

    def check(self) -> None:
        """Raises SetupError for a layer whose inputs do not fill its groups."""
        for name, columns in self.columns.items():
            if self.target == "int4" and columns % self.group:
                raise SetupError(
                    f"{name} has {columns} inputs, not a multiple of {self.group}; give a "
                    f"--group-size that divides {columns}"
                )

    def stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors to write for this tensor: itself, or those of its quantized layer."""
        layer, _, suffix = name.rpartition(".")
        if suffix != "weight" or layer not in self.columns:
            return {name: tensor}
        if layer in self.done:
            return self.done[layer]
        return stored_tensors(layer, quantize_weight(tensor, self.scheme, tensor.dtype))

    def config(self) -> dict[str, Any]:
        """The `quantization_config` for config.json."""
        return {
            "quant_method": "compressed-tensors",
            "format": _FORMATS[self.target],
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": ["lm_head", *(f"re:.*{re.escape(name)}$" for name in self.plain)],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": self._weights(),
                    "input_activations": self._inputs(),
                    "output_activations": None,
                }
            },
        }

    def _weights(self) -> dict[str, Any]:
        four = self.target == "int4"
        return {
            "num_bits": 4 if four else 8,
            "type": "float" if self.target == "fp8" else "int",
            "symmetric": True,
            "strategy": "group" if four else "channel",
            "group_size": self.group if four else None,
            "dynamic": False,
        }

    def _inputs(self) -> dict[str, Any] | None:
        if self.target == "int4":
            return None
        return {
            "num_bits": 8,
            "type": "float" if self.target == "fp8" else "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }


def stored_tensors(layer: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of a quantized layer in a checkpoint, by name."""
    if isinstance(weight, ScaledWeight):
        return {f"{layer}.weight": weight.values, f"{layer}.weight_scale": weight.scales}
    return {
        f"{layer}.weight_packed": pack(unpack_runs(weight.values, weight.columns), 4),
        f"{layer}.weight_scale": weight.scales,
        f"{layer}.weight_shape": torch.tensor(weight.shape),
    }


def check_absent(output: Path) -> None:
    """Raises SetupError if the path to write to exists."""
    if output.exists() or output.is_symlink():
        raise SetupError(f"{output} exists; give the name of a folder that does not")


def write_folder(
    source: Path,
    output: Path,
    layers: Layers,
    files: Mapping[Path, list[str]],
    read: Callable[[Path, list[str]], Mapping[str, Tensor]],
    advance: Callable[[int], None],
) -> None:
    """Writes a quantized copy of the model in `source` to `output`, which must not exist.

    The folder gets its name when it is complete. It also has the files of `source` that are not
    weights. `files` are those of weights, with the names of the tensors to write. `read` returns
    such tensors of one file. `advance` receives the bytes read since its last call.

    Raises:
        SetupError: `output` exists, its weights cannot be written, or a layer cannot be quantized
            this way.
        OSError: a file cannot be read or written.
    """
    layers.check()
    check_absent(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        _write_weights(partial, layers, files, read, advance)
        _write_rest(source, partial, layers)
        _allow_reading(partial)
        partial.rename(output)
    except SafetensorError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise SetupError(
            f"the weights of {output} cannot be written: {error}; make room there, or give another "
            "folder"
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_weights(
    folder: Path,
    layers: Layers,
    files: Mapping[Path, list[str]],
    read: Callable[[Path, list[str]], Mapping[str, Tensor]],
    advance: Callable[[int], None],
) -> None:
    """Writes a file for each of `files` that has tensors to write, and the index."""
    places: dict[str, str] = {}
    size = 0
    for path, names in files.items():
        if not names:
            continue
        written: dict[str, Tensor] = {}
        for name, tensor in read(path, names).items():
            stored = layers.stored(name, tensor)
            written |= {key: value.contiguous() for key, value in stored.items()}
            advance(tensor.nbytes)
        save_file(written, folder / path.name, metadata={"format": "pt"})
        places |= dict.fromkeys(written, path.name)
        size += sum(int(tensor.nbytes) for tensor in written.values())
    _write_index(folder, places, size)


def _write_index(folder: Path, places: dict[str, str], size: int) -> None:
    """Writes the file of each tensor, unless a single file with the default name has them all."""
    if all(name == SINGLE for name in places.values()):
        return
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_rest(source: Path, folder: Path, layers: Layers) -> None:
    """Writes config.json, and copies the files that are neither weights nor hidden."""
    for path in sorted(source.iterdir()):
        left_out = path.name in (INDEX, "config.json") or path.name.startswith(".")
        if path.is_file() and not left_out and path.suffix not in _WEIGHTS:
            shutil.copyfile(path, folder / path.name)
    config = read_json_object(source / "config.json")
    config["quantization_config"] = layers.config()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _allow_reading(folder: Path) -> None:
    """Sets the default permissions of a new folder and its files on a temporary folder."""
    mask = os.umask(0)  # the umask can be read only by setting it
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~mask)
