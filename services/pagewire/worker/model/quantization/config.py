"""Reads `quantization_config` of config.json. This module needs no torch."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pagewire.worker.errors import SetupError
from pagewire.worker.model.quantization.awq import parse_awq
from pagewire.worker.model.quantization.compressed_tensors import parse_compressed_tensors
from pagewire.worker.model.quantization.fields import Fields
from pagewire.worker.model.quantization.fp8 import parse_fp8
from pagewire.worker.model.quantization.gptq import parse_gptq
from pagewire.worker.model.quantization.mxfp4 import parse_mxfp4
from pagewire.worker.model.quantization.scheme import (
    ALL,
    HEAD,
    Fp8Scheme,
    Int8Scheme,
    Quantization,
    Rule,
)

_PARSERS: dict[str, Callable[[Fields], Quantization]] = {
    "compressed-tensors": parse_compressed_tensors,
    "fp8": parse_fp8,
    "gptq": parse_gptq,
    "awq": parse_awq,
    "mxfp4": parse_mxfp4,
}


def parse_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """The quantization that a decoded config.json describes; None for plain weights.

    Raises:
        SetupError: names the method, the field and the unsupported value.
    """
    found = raw.get("quantization_config") or raw.get("compression_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise SetupError(f"config.json: quantization_config is {found!r}; it must be an object")
    method = found.get("quant_method", "missing")
    parser = _PARSERS.get(method) if isinstance(method, str) else None
    if parser is None:
        raise SetupError(
            f"config.json: quantization_config.quant_method is {method!r}; supported are "
            f"{', '.join(_PARSERS)}; use such weights, or those in bfloat16, float16 or float32"
        )
    return parser(Fields(method, found))


def online_quantization(kind: Literal["fp8", "int8"]) -> Quantization:
    """Quantizes all linear layers except the head while plain weights are loaded."""
    scheme = Fp8Scheme() if kind == "fp8" else Int8Scheme()
    return Quantization("online", (Rule((ALL,), scheme),), (HEAD,))
