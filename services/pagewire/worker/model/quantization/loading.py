"""Collects the tensors of quantized layers from a checkpoint's files, and fills the weights."""

from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.quantization.parts import QuantizedPart
from pagewire.worker.model.quantization.stored import StoredTensor


class QuantizedLayers:
    """The quantized layers that are being loaded.

    When the last tensor of a layer arrives, the layer is written on the device, and its tensors are
    released.
    """

    def __init__(
        self, parts: Mapping[str, QuantizedPart], dtype: torch.dtype, present: Container[str]
    ) -> None:
        """`present` has the names of all tensors of the checkpoint."""
        self._parts = parts
        self._dtype = dtype
        self._wanted = {
            name: {
                suffix: tensor
                for suffix, tensor in part.stored.tensors().items()
                if tensor.needed or f"{name}.{suffix}" in present
            }
            for name, part in parts.items()
        }
        self._held: dict[str, dict[str, Tensor]] = {name: {} for name in parts}

    def wants(self, name: str) -> StoredTensor | None:
        """The required shapes and types of a tensor of this name; None if no layer has it."""
        layer, _, suffix = name.rpartition(".")
        return self._wanted.get(layer, {}).get(suffix)

    def may_have_bias(self, name: str) -> bool:
        """Whether a tensor is the bias of a quantized layer; some exporters store zero biases."""
        layer, _, suffix = name.rpartition(".")
        return layer in self._parts and suffix == "bias"

    def take(self, name: str, tensor: Tensor) -> None:
        """Keeps a tensor that `wants` describes; writes the layer if this is its last tensor.

        SetupError names the layer and the fault.
        """
        layer, _, suffix = name.rpartition(".")
        part, held = self._parts[layer], self._held[layer]
        held[suffix] = tensor.to(part.whole.values.device)
        if held.keys() < self._wanted[layer].keys():
            return
        try:
            part.fill(part.stored.read(held, self._dtype))
        except SetupError as error:
            raise SetupError(f"{layer}: {error}") from error
        held.clear()

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the names and shapes of all needed tensors."""
        for layer, wanted in self._wanted.items():
            for suffix, tensor in wanted.items():
                yield f"{layer}.{suffix}", tensor.shapes[0]
