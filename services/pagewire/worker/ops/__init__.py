"""The operations a decoder is made of, in two interchangeable implementations.

`load_ops("torch")` runs on any device; `load_ops("triton")` needs an NVIDIA GPU. Functions of the
same name take the same arguments and compute the same function, so one decoder drives either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Literal

from torch import Tensor

from pagewire.worker.ops.reference.sampling import SamplingState

Name = Literal["torch", "triton"]

_PACKAGES = {"torch": "reference", "triton": "triton"}
_MODULES = ("norm", "activation", "linear", "rope", "attention", "sampling", "step", "blocks")


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation's operations. The functions of `ops.reference` document them."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    silu_mul: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    norm_linear: Callable[..., Tensor]
    linear_add: Callable[..., Tensor]
    norm_gate_up_silu_mul: Callable[..., Tensor]
    norm_qkv_rope_kv_write: Callable[..., Tensor]
    qk_norm_rope_kv_write: Callable[..., Tensor]
    plan_decode: Callable[..., Any]
    decode_attention: Callable[..., Tensor]
    prefill_attention: Callable[..., Tensor]
    sample: Callable[..., Tensor]
    logprobs: Callable[..., tuple[Tensor, Tensor, Tensor]]
    begin_decode: Callable[..., tuple[Tensor, Tensor]]
    gather_sampling: Callable[..., SamplingState]
    end_decode: Callable[..., Tensor]
    copy_blocks: Callable[..., Tensor]


def load_ops(name: Name) -> Ops:
    """Return the operations of one name; triton is imported only when it is asked for.

    Raises:
        ValueError: the name is neither "torch" nor "triton".
    """
    if name not in _PACKAGES:
        raise ValueError(f"unknown ops {name!r}: use 'torch' or 'triton'")
    modules = [import_module(f"{__name__}.{_PACKAGES[name]}.{module}") for module in _MODULES]
    if name == "triton":
        import_module(f"{__name__}.triton.cache_keys").settle_cache_keys()
    functions = {
        field.name: next(getattr(m, field.name) for m in modules if hasattr(m, field.name))
        for field in fields(Ops)
    }
    return Ops(**functions)
