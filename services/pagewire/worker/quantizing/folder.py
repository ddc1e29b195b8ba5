"""Quantizes the weights of a model folder and writes them as another folder."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.checkpoint import opened, plain_tensors, weight_files
from pagewire.worker.model.config import ModelConfig, read_model_config
from pagewire.worker.model.progress import progress
from pagewire.worker.model.quantization.export import (
    Layers,
    Target,
    check_absent,
    stored_tensors,
    write_folder,
)
from pagewire.worker.model.stacks import layer_columns, layer_name, layer_stacks
from pagewire.worker.quantizing.calibration import layer_inputs, read_sequences
from pagewire.worker.quantizing.error_feedback import round_with_feedback


def quantize_folder(
    source: Path, output: Path, target: Target, group: int, texts: Path | None = None
) -> tuple[int, int]:
    """Writes the model in `source` with quantized layers to the folder `output`.

    All linear layers of the decoder are quantized, except routers, gates of shared experts and the
    head. `group` is the number of inputs that share a scale with four bits. Values are rounded to
    the nearest, or, with a file of `texts`, so that outputs for such texts change little.

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
    if texts is not None and model.experts is not None:
        raise SetupError(
            f"{source}: --calibrate is for dense models, and {model.family} has experts; leave it "
            "out"
        )
    files = plain_tensors(weight_files(source), model)
    names = [] if model.experts is None else [model.names.part("router")]
    if model.experts is not None and model.experts.shared_gate:
        names.append(model.names.part("shared_gate"))
    layers = Layers(layer_columns(model), target, group, tuple(names))
    if texts is None:
        return _write(source, output, layers, files)
    layers.check()
    check_absent(output)
    sequences = read_sequences(texts, source, model.max_position_embeddings, model.vocab_size)
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        # The inputs of each layer come from quantized layers before it.
        nearest = Path(folder) / "nearest"
        _write(source, nearest, layers, files)
        done = dict(_calibrated(model, nearest, layers, files, sequences))
    return _write(source, output, replace(layers, done=done), files)


def _write(
    source: Path, output: Path, layers: Layers, files: dict[Path, list[str]]
) -> tuple[int, int]:
    """Writes the tensors that `files` names; returns the bytes before and after."""
    total = _bytes(files)
    with progress(f"quantizing to {layers.target}", total) as advance:
        write_folder(source, output, layers, files, _tensors, advance)
    return total, _bytes(weight_files(output))


def _calibrated(
    model: ModelConfig,
    nearest: Path,
    layers: Layers,
    files: dict[Path, list[str]],
    sequences: list[list[int]],
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The name of each quantized layer, and its tensors.

    `nearest` is the same model with values rounded to the nearest.
    """
    places = {name: path for path, names in files.items() for name in names}
    with progress("calibrating", _bytes(files)) as advance:
        for number, squares in enumerate(layer_inputs(nearest, sequences)):
            prefix = layer_name(model, number)
            for matrix, stack in layer_stacks(model, number).items():
                if not squares[matrix].isfinite().all():
                    raise SetupError(
                        f"--calibrate: for these texts the inputs of {prefix}{stack.names[0]} are "
                        "not finite; check the weights, or leave it out"
                    )
                for name in stack.names:
                    known = model.names.stored(f"{prefix}{name}")
                    layer = next(one for one in known if f"{one}.weight" in places)
                    with opened(places[f"{layer}.weight"]) as file:
                        weight: Tensor = file.get_tensor(f"{layer}.weight")
                    rounded = round_with_feedback(
                        weight, squares[matrix], layers.scheme, weight.dtype
                    )
                    yield layer, stored_tensors(layer, rounded)
                    advance(weight.nbytes)


def _tensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Some tensors of one file, which stay in the file until they are used."""
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in names}


def _bytes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)
