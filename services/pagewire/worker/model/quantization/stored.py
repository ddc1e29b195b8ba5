"""How checkpoints store a quantized layer: its tensors and their meaning.

The code that writes the formats describes them: compressed-tensors (naive_quantized and
pack_quantized), AutoGPTQ and GPTQModel (qlinear), AutoAWQ (WQLinear_GEMM), and transformers'
fine-grained FP8.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.worker.errors import SetupError
from pagewire.worker.model.quantization.packing import AWQ_ORDER, pack_runs, unpack
from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.model.quantization.scheme import (
    Fp8Scheme,
    GroupedScheme,
    Int8Scheme,
    Method,
    Scheme,
)
from pagewire.worker.ops.contract.quantized import GroupedWeight, QuantizedWeight, ScaledWeight

PLAIN = ("F32", "F16", "BF16")
_INT32 = ("I32",)
_SCALAR = ((1,), ())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a layer: possible shapes, and possible types by safetensors' names."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    needed: bool = True


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer of `rows` output and `columns` input features in a kind of checkpoint."""

    method: Method
    scheme: Scheme
    rows: int
    columns: int
    # Number of experts, with rows one below the other; 0 for an ordinary layer. With `in_turns`,
    # the rows of each expert's gates and values alternate.
    experts: int = 0
    in_turns: bool = False

    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors of the layer, by the last part of their names."""
        if self.method == "online":
            return {"weight": StoredTensor((self._shape,), PLAIN)}
        if not isinstance(self.scheme, GroupedScheme):
            return self._scaled_tensors(self.scheme)
        if self.method == "compressed-tensors":
            return self._packed_tensors(self.scheme)
        if self.method == "mxfp4":
            return self._mxfp4_tensors(self.scheme)
        return self._transposed_tensors(self.scheme)

    def read(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> QuantizedWeight:
        """The weight that the layer's tensors describe, on their device.

        `dtype` is the type of the scales of a grouped weight. SetupError names a tensor with
        unsupported values.
        """
        if self.method == "online":
            return quantize_weight(stored["weight"], self.scheme, dtype)
        if not isinstance(self.scheme, GroupedScheme):
            return self._read_scaled(self.scheme, stored)
        if self.method == "mxfp4":
            return self._read_mxfp4(self.scheme, stored)
        readers: dict[str, Callable[[Mapping[str, Tensor], GroupedScheme], _Integers]] = {
            "compressed-tensors": self._packed_integers,
            "awq": self._awq_integers,
        }
        integers = readers.get(self.method, self._gptq_integers)(stored, self.scheme)
        return self._grouped(integers, self.scheme, dtype)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def _group(self, scheme: GroupedScheme) -> int:
        return scheme.group or self.columns

    def _scaled_tensors(self, scheme: Fp8Scheme | Int8Scheme) -> dict[str, StoredTensor]:
        block = scheme.block if isinstance(scheme, Fp8Scheme) else None
        if block is not None:
            shapes: tuple[tuple[int, ...], ...] = (
                (-(-self.rows // block[0]), -(-self.columns // block[1])),
            )
        else:
            shapes = _SCALAR if scheme.per_tensor else ((self.rows, 1), (self.rows,))
        weight = "F8_E4M3" if isinstance(scheme, Fp8Scheme) else "I8"
        tensors = {
            "weight": StoredTensor((self._shape,), (weight,)),
            self._scale_name(scheme): StoredTensor(shapes, PLAIN),
        }
        if scheme.static:
            tensors["input_scale"] = StoredTensor(_SCALAR, PLAIN)
        return tensors

    def _scale_name(self, scheme: Scheme) -> str:
        block = self.method == "fp8" and isinstance(scheme, Fp8Scheme) and scheme.block is not None
        return "weight_scale_inv" if block else "weight_scale"

    def _read_scaled(
        self, scheme: Fp8Scheme | Int8Scheme, stored: Mapping[str, Tensor]
    ) -> ScaledWeight:
        scales = stored[self._scale_name(scheme)].float()
        block = scheme.block if isinstance(scheme, Fp8Scheme) else None
        if block is None:
            scales = scales.reshape(-1, 1).expand(self.rows, 1)
        input_scale = stored["input_scale"].float().reshape(1) if scheme.static else None
        return ScaledWeight(stored["weight"], scales, block or (1, self.columns), input_scale)

    def _packed_tensors(self, scheme: GroupedScheme) -> dict[str, StoredTensor]:
        """The tensors of compressed-tensors.

        Weights are packed along the inputs, zero points along the outputs.
        """
        groups, per_word = -(-self.columns // self._group(scheme)), 32 // scheme.bits
        tensors = {
            "weight_packed": StoredTensor(((self.rows, -(-self.columns // per_word)),), _INT32),
            "weight_scale": StoredTensor(((self.rows, groups),), PLAIN),
            "weight_shape": StoredTensor(((2,),), ("I64", "I32"), needed=False),
        }
        if not scheme.symmetric:
            shape = (-(-self.rows // per_word), groups)
            tensors["weight_zero_point"] = StoredTensor((shape,), _INT32)
        if scheme.ordered:
            tensors["weight_g_idx"] = StoredTensor(((self.columns,),), _INT32)
        return tensors

    def _transposed_tensors(self, scheme: GroupedScheme) -> dict[str, StoredTensor]:
        """The tensors `[in, out]` of GPTQ, packed along the inputs, or AWQ, along the outputs."""
        groups, per_word = -(-self.columns // self._group(scheme)), 32 // scheme.bits
        words = -(-self.rows // per_word)
        awq = self.method == "awq"
        weight = (self.columns, words) if awq else (-(-self.columns // per_word), self.rows)
        tensors = {
            "qweight": StoredTensor((weight,), _INT32),
            "qzeros": StoredTensor(((groups, words),), _INT32),
            "scales": StoredTensor(((groups, self.rows),), PLAIN),
        }
        if not awq:
            index = StoredTensor(((self.columns,),), _INT32, needed=scheme.ordered)
            tensors["g_idx"] = index
        return tensors

    def _mxfp4_tensors(self, scheme: GroupedScheme) -> dict[str, StoredTensor]:
        """The tensors of gpt-oss: bytes of two neighbours by group, and exponents of scales."""
        size = self._group(scheme)
        groups = (self.experts, self.rows // self.experts, self.columns // size)
        return {
            "blocks": StoredTensor(((*groups, size // 2),), ("U8",)),
            "scales": StoredTensor((groups,), ("U8",)),
        }

    def _read_mxfp4(self, scheme: GroupedScheme, stored: Mapping[str, Tensor]) -> GroupedWeight:
        blocks = stored["blocks"].flatten(2)  # [experts, rows of one, columns / 2]
        values = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
        scales = stored["scales"]
        if self.in_turns:
            values, scales = (torch.cat((t[:, ::2], t[:, 1::2]), 1) for t in (values, scales))
        return GroupedWeight(
            values=pack_runs(values.flatten(0, 1)),
            scales=scales.flatten(0, 1),
            zeros=None,
            order=None,
            bits=4,
            group=self._group(scheme),
            columns=self.columns,
            float4=True,
        )

    def _packed_integers(self, stored: Mapping[str, Tensor], scheme: GroupedScheme) -> "_Integers":
        shape = stored.get("weight_shape")
        if shape is not None and shape.tolist() != list(self._shape):
            raise SetupError(f"weight_shape is {shape.tolist()}, config.json needs {self._shape}")
        values = unpack(stored["weight_packed"], scheme.bits)[:, : self.columns]
        zeros = None
        if not scheme.symmetric:
            zeros = unpack(stored["weight_zero_point"].t(), scheme.bits)[:, : self.rows].t()
        return _Integers(values, stored["weight_scale"], zeros, stored.get("weight_g_idx"))

    def _gptq_integers(self, stored: Mapping[str, Tensor], scheme: GroupedScheme) -> "_Integers":
        values = unpack(stored["qweight"].t(), scheme.bits)[:, : self.columns]
        zeros = unpack(stored["qzeros"], scheme.bits)[:, : self.rows].t()
        if self.method == "gptq":  # the first version stores zero points minus one
            zeros = (zeros + 1) & ((1 << scheme.bits) - 1)
        if scheme.symmetric:
            middle = 1 << (scheme.bits - 1)
            if not bool((zeros == middle).all()):
                raise SetupError(f"qzeros are not all {middle}, as quantization_config.sym needs")
            return _Integers(values, stored["scales"].t(), None, stored.get("g_idx"))
        return _Integers(values, stored["scales"].t(), zeros, stored.get("g_idx"))

    def _awq_integers(self, stored: Mapping[str, Tensor], scheme: GroupedScheme) -> "_Integers":
        values = unpack(stored["qweight"], scheme.bits, AWQ_ORDER)[:, : self.rows].t()
        zeros = unpack(stored["qzeros"], scheme.bits, AWQ_ORDER)[:, : self.rows].t()
        return _Integers(values, stored["scales"].t(), zeros, None)

    def _grouped(
        self, integers: "_Integers", scheme: GroupedScheme, dtype: torch.dtype
    ) -> GroupedWeight:
        group, values = self._group(scheme), integers.values
        order = None
        if integers.group_index is not None:
            order = self._order(integers.group_index, group)
            if scheme.ordered:
                values = values[:, order]
            elif not torch.equal(order, torch.arange(self.columns, device=order.device)):
                raise SetupError("g_idx orders the inputs, but the configuration says otherwise")
        return GroupedWeight(
            values=pack_runs(values) if scheme.bits == 4 else values.contiguous(),
            scales=integers.scales.to(dtype),
            zeros=integers.zeros,
            order=order.int() if order is not None and scheme.ordered else None,
            bits=scheme.bits,
            group=group,
            columns=self.columns,
        )

    def _order(self, group_index: Tensor, group: int) -> Tensor:
        """The inputs in the order of their groups; SetupError if groups are not of one size."""
        order = group_index.argsort(stable=True)
        expected = torch.arange(self.columns, device=order.device) // group
        if not torch.equal(group_index[order].long(), expected):
            raise SetupError(f"g_idx does not put {group} inputs into each group")
        return order


@dataclass(frozen=True, slots=True)
class _Integers:
    """The integers of a layer before they are packed for the kernels."""

    values: Tensor  # [rows, columns] uint8
    scales: Tensor  # [rows, groups]
    zeros: Tensor | None  # [rows, groups] uint8
    group_index: Tensor | None  # [columns], the group of each input
