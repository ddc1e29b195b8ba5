"""Quantizes the weights of a model folder and writes them as another folder."""

from pathlib import Path

from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.checkpoint import check_plain, opened, weight_files
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.progress import progress
from pagewire.worker.model.quantization.export import Layers, Target, write_folder
from pagewire.worker.model.stacks import layer_columns


def quantize_folder(source: Path, output: Path, target: Target, group: int) -> tuple[int, int]:
    """Writes the model in `source` with quantized layers to the folder `output`.

    All linear layers of the decoder are quantized but routers, gates of shared experts and the
    head. `group` is the number of inputs
    that share a scale with four bits.

    Returns:
        The bytes of the weight files before and after.

    Raises:
        SetupError: the model cannot be read or quantized so, or `output` exists.
        OSError: a file cannot be written.
    """
    model = read_model_config(source)
    if model.quantization is not None:
        raise SetupError(
            f"{source} is quantized already, by {model.quantization.method}; give plain weights"
        )
    model.check_quantizable(f"{source}: quantized to {target}")
    if model.names.ignored:
        raise SetupError(
            f"{source}: models of the family {model.family} have parts that are not text, which "
            f"cannot be quantized to {target} here; serve it with --quantization"
        )
    files = weight_files(source)
    check_plain(files, model)
    names = [] if model.experts is None else [model.names.part("router")]
    if model.experts is not None and model.experts.shared_gate:
        names.append(model.names.part("shared_gate"))
    layers = Layers(layer_columns(model), target, group, tuple(names))
    total = _bytes(files)
    with progress(f"quantizing to {target}", total) as advance:
        write_folder(source, output, layers, files, _tensors, advance)
    return total, _bytes(weight_files(output))


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, which stay in the file until they are used."""
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _bytes(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)
