"""The operations that a decoder is made of: a contract and two implementations of it.

`contract` documents each operation. `reference` implements them in plain torch for any device;
tests compare the kernels with it. `triton` implements them for NVIDIA GPUs, with GEMMs of `cublas`.
The results of `triton.invariant` do not depend on the batch. `runtime` and `model` decide when an
operation runs.
"""

from __future__ import annotations

from typing import Literal

from pagewire.worker.ops.contract.ops import Ops

__all__ = ["Name", "Ops", "load_ops"]

Name = Literal["torch", "triton", "invariant"]


def load_ops(name: Name) -> Ops:
    """Return the operations of one implementation; imports no Triton for "torch".

    Raises:
        ValueError: the name is not one of `Name`.
    """
    if name == "torch":
        from pagewire.worker.ops.reference import ops as torch_ops

        return torch_ops
    if name == "triton":
        from pagewire.worker.ops.triton import ops as triton_ops
        from pagewire.worker.ops.triton.cache_keys import compute_cache_keys

        compute_cache_keys()
        return triton_ops
    if name == "invariant":
        from pagewire.worker.ops.triton.cache_keys import compute_cache_keys
        from pagewire.worker.ops.triton.invariant import ops as invariant_ops

        compute_cache_keys()
        return invariant_ops
    raise ValueError(f"unknown ops {name!r}: use 'torch', 'triton' or 'invariant'")
