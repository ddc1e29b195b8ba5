"""Tiny quantized checkpoints, and the equivalent model in plain torch for each.

The library compressed-tensors writes its own checkpoints. Code that follows the packing loops of
AutoGPTQ and AutoAWQ writes the others. Nothing here uses the worker's code that reads them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from support.models.tiny_models import save_model

Stored = dict[str, Tensor]
FP8 = torch.float8_e4m3fn
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint: its configuration, and how a weight and its inputs are quantized."""

    config: dict[str, Any]
    # For a weight [out, in]: the stored tensors by suffix, and the dequantized weight.
    store: Callable[[Tensor], tuple[Stored, Tensor]]
    inputs: Callable[[Tensor], Tensor] = field(default=lambda x: x)
    head: bool = False


def save_quantized(
    folder: Path,
    variant: str,
    form: Format,
    skip: Sequence[str] = ("lm_head",),
    **overrides: Any,
) -> PreTrainedModel:
    """Saves a model of `tiny_models` quantized; returns it in float32 with dequantized weights.

    Layers whose name ends with one of `skip` stay as they are.
    """
    model = save_model(folder, variant, **overrides)
    quantize_saved(folder, model, form, skip)
    return model


def quantize_saved(
    folder: Path, model: PreTrainedModel, form: Format, skip: Sequence[str], only: str = ""
) -> None:
    """Quantizes a model and its copy in `folder`; only layers with `only` in their names."""
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name.endswith(tuple(skip)) or only not in name:
            continue
        stored, meant = form.store(module.weight.data)
        name = _saved_name(name, module.weight.data, tensors)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
        module.weight.data.copy_(meant)
        module.register_forward_pre_hook(lambda _, given: (form.inputs(given[0]),))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = form.config
    (folder / "config.json").write_text(json.dumps(config))


def _saved_name(name: str, weight: Tensor, tensors: Stored) -> str:
    """The name of a layer in a file, which differs from its name in some models."""
    if f"{name}.weight" in tensors:
        return name
    found = next(key for key, tensor in tensors.items() if torch.equal(tensor, weight))
    return found.removesuffix(".weight")


def rounded_rows(x: Tensor, largest: float, group: int | None = None) -> Tensor:
    """Inputs rounded to eight bits, with a scale for each token or each group of a token."""
    parts = []
    for part in x.split(group or x.shape[-1], -1):
        scale = part.abs().amax(-1, keepdim=True) / largest
        scale = scale.masked_fill(scale == 0, 1.0)
        parts.append(_rounded(part / scale, largest) * scale)
    return torch.cat(parts, -1)


def rounded_by(x: Tensor, scale: float, largest: float) -> Tensor:
    """Inputs rounded to eight bits with one scale."""
    return _rounded((x / scale).clamp(-largest, largest), largest) * scale


def _rounded(x: Tensor, largest: float) -> Tensor:
    return x.round() if largest == 127 else x.to(FP8).float()


def compressed_tensors(
    weights: dict[str, Any], inputs: dict[str, Any] | None, kind: str, **more: Any
) -> Format:
    """A format of compressed-tensors, with the library's names of fields."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }
    scheme = QuantizationScheme.model_validate(group)
    compressor = BaseCompressor.get_value_from_registry(kind)

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        given = {"weight": weight, **_scales(weight, scheme)}
        stored = compressor.compress(given, scheme)
        meant = compressor.decompress(stored, scheme)["weight"].float()
        if inputs is not None and not inputs["dynamic"]:
            stored["input_scale"] = torch.tensor([INPUT_SCALE])
        return stored, meant

    largest = 448.0 if weights["type"] == "float" else 127.0
    if inputs is None:
        return Format(config, store)
    if not inputs["dynamic"]:
        return Format(config, store, lambda x: rounded_by(x, INPUT_SCALE, largest))
    return Format(config, store, lambda x: rounded_rows(x, largest, inputs.get("group_size")))


INPUT_SCALE = 0.04  # inputs of the tiny models reach about 10


def _scales(weight: Tensor, scheme: QuantizationScheme) -> Stored:
    """Scales from the largest magnitudes, and zero points."""
    args = scheme.weights
    assert args is not None
    steps = 448.0 if args.type == "float" else float(2 ** (args.num_bits - 1) - 1)
    if args.strategy == "tensor":
        return {"weight_scale": weight.abs().amax().reshape(1) / steps}
    if args.strategy == "block":
        rows, columns = args.block_structure
        blocks = [
            [block.abs().amax() / steps for block in line.split(columns, 1)]
            for line in weight.split(rows, 0)
        ]
        return {"weight_scale": torch.tensor(blocks)}
    width = args.group_size if args.strategy == "group" else weight.shape[1]
    grouped = weight.unflatten(1, (-1, width))
    if args.symmetric:
        return {"weight_scale": grouped.abs().amax(-1) / steps}
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = (high - low) / (2 * steps + 1)
    zeros = (-low / scale - steps - 1).round().clamp(-steps - 1, steps)
    return {"weight_scale": scale, "weight_zero_point": zeros.to(torch.int8)}


def fp8_blocks() -> Format:
    """Blocks of 128 by 128, as DeepSeek-V3 stores them."""
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        values = torch.empty_like(weight, dtype=FP8)
        scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        meant = torch.empty_like(weight)
        for i, j in np.ndindex(*scales.shape):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[part].abs().max() / 448
            values[part] = (weight[part] / scales[i, j]).to(FP8)
            meant[part] = values[part].float() * scales[i, j]
        return {"weight": values, "weight_scale_inv": scales}, meant

    return Format(config, store, lambda x: rounded_rows(x, 448.0, 128))


def fp8_tensor(activations: str) -> Format:
    """One scale for each tensor."""
    config = {"quant_method": "fp8", "activation_scheme": activations, "ignored_layers": []}

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        scale = weight.abs().max() / 448
        values = (weight / scale).to(FP8)
        stored = {"weight": values, "weight_scale": scale}
        if activations == "static":
            stored["input_scale"] = torch.tensor(INPUT_SCALE)
        return stored, values.float() * scale

    if activations == "static":
        return Format(config, store, lambda x: rounded_by(x, INPUT_SCALE, 448.0))
    return Format(config, store, lambda x: rounded_rows(x, 448.0))


def gptq(bits: int, group: int, symmetric: bool, order: bool = False, version: int = 1) -> Format:
    """GPTQ's layout: int32 words along the inputs, zero points less one in version 1."""
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": order,
        "damp_percent": 0.01,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        groups = np.arange(columns) // size
        if order:
            groups = np.random.default_rng(columns).permutation(groups)
        values, scales, zeros, meant = _integers(weight, groups, bits, symmetric)
        stored = {
            "qweight": _words(values, bits).T,
            "qzeros": _words(zeros.T - (1 if version == 1 else 0), bits),
            "scales": scales.T,
            "g_idx": groups,
        }
        dtypes = {"scales": torch.float32}
        return {
            name: torch.tensor(np.ascontiguousarray(array), dtype=dtypes.get(name, torch.int32))
            for name, array in stored.items()
        }, meant

    return Format(config, store)


def awq(group: int) -> Format:
    """AWQ's layout `gemm`: int32 words along the outputs, with interleaved values."""
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        groups = np.arange(weight.shape[1]) // group
        values, scales, zeros, meant = _integers(weight, groups, 4, symmetric=False)
        return {
            "qweight": torch.from_numpy(_words(values.T, 4, AWQ_PLACES)),
            "qzeros": torch.from_numpy(_words(zeros.T, 4, AWQ_PLACES)),
            "scales": torch.tensor(scales.T),
        }, meant

    return Format(config, store)


def _integers(
    weight: Tensor, groups: np.ndarray, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """Values [out, in], scales and zero points [out, groups], and the dequantized weight."""
    exact, steps = weight.numpy().astype(np.float32), 2**bits - 1
    shape = (len(exact), groups.max() + 1)
    scales, zeros = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    values, meant = np.zeros(exact.shape, np.int64), np.zeros_like(exact)
    for g in range(shape[1]):
        inside = groups == g
        part = exact[:, inside]
        low, high = part.min(1, keepdims=True), part.max(1, keepdims=True)
        if symmetric:
            scale, zero = 2 * np.abs(part).max(1, keepdims=True) / steps, 2 ** (bits - 1)
        else:
            scale = (high - low) / steps
            # Not 0, which version 1 of GPTQ cannot store.
            zero = np.clip(np.round(-low / scale), 1, steps)
        integers = np.clip(np.round(part / scale + zero), 0, steps)
        scales[:, g : g + 1], zeros[:, g : g + 1] = scale, zero
        values[:, inside] = integers
        meant[:, inside] = ((integers - zero) * scale).astype(np.float32)
    return values, scales, zeros, torch.from_numpy(meant)


def _words(values: np.ndarray, bits: int, places: Sequence[int] | None = None) -> np.ndarray:
    """int32 words along the last axis, the first value in the lowest bits."""
    count = 32 // bits
    words = np.zeros((len(values), values.shape[1] // count), np.uint32)
    for word in range(words.shape[1]):
        for at in range(count):
            chosen = values[:, word * count + (at if places is None else places[at])]
            words[:, word] |= chosen.astype(np.uint32) << np.uint32(bits * at)
    return words.astype(np.int32)
