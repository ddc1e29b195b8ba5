"""Matrix products by an algorithm of one's choice: as much of cuBLASLt as that needs.

torch takes the first algorithm that the library's heuristics name. Names and numbers are those of
`cublasLt.h`; the library itself is the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from copy import copy
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint16,
    c_uint32,
    c_uint64,
)
from ctypes import c_void_p as Handle
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

# As much as torch gives cuBLAS on Hopper.
WORKSPACE_BYTES = 32 << 20
# Addresses of matrices are multiples of this, as the heuristics assume.
ALIGNMENT = 256

# Asked for with less workspace, the heuristics name other algorithms.
_WORKSPACE_LIMITS = (WORKSPACE_BYTES, WORKSPACE_BYTES // 8, 0)
# So many they name at most; asked for 256 with cuBLAS 13.1, no more.
_MAX_RESULTS = 8

# cublasLtMatmulAlgoConfigAttributes_t: number and type of each setting of an algorithm.
SETTINGS = {
    "id": (0, c_int32),
    "tile": (1, c_uint32),
    "split_k": (2, c_int32),
    "reduction": (3, c_uint32),
    "swizzle": (4, c_uint32),
    "custom": (5, c_uint32),
    "stages": (6, c_uint32),
    "inner_shape": (7, c_uint16),
    "cluster": (8, c_uint16),
}

_DATA_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
_CUDA_R_32F = 0
_COMPUTE_32F = 68
_MATMUL_DESC_TRANSA = 3
_OP_T = 1
_PREF_MAX_WORKSPACE_BYTES = 1


class _Algorithm(Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = (("data", c_uint64 * 8),)


class _HeuristicResult(Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algo", _Algorithm),
        ("workspace_size", c_size_t),
        ("state", c_int),
        ("waves_count", c_float),
        ("reserved", c_int * 4),
    )


_ARGUMENTS: dict[str, list[Any]] = {
    "cublasLtCreate": [POINTER(Handle)],
    "cublasLtMatmulDescCreate": [POINTER(Handle), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [Handle, c_int, Handle, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(Handle), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [POINTER(Handle)],
    "cublasLtMatmulPreferenceSetAttribute": [Handle, c_int, Handle, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [Handle],
    "cublasLtMatmulAlgoGetHeuristic": [
        *[Handle] * 7,
        c_int,
        POINTER(_HeuristicResult),
        POINTER(c_int),
    ],
    "cublasLtMatmulAlgoConfigSetAttribute": [POINTER(_Algorithm), c_int, Handle, c_size_t],
    "cublasLtMatmulAlgoCheck": [
        *[Handle] * 6,
        POINTER(_Algorithm),
        POINTER(_HeuristicResult),
    ],
    "cublasLtMatmul": [
        Handle,
        Handle,
        POINTER(c_float),
        *[Handle] * 4,
        POINTER(c_float),
        *[Handle] * 4,
        POINTER(_Algorithm),
        Handle,
        c_size_t,
        Handle,
    ],
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a product `x [tokens, k] @ weight [features, k].T`; `add` if it is added to the output."""

    tokens: int
    features: int
    k: int
    dtype: torch.dtype
    add: bool


@dataclass(frozen=True, slots=True, eq=False)
class Algorithm:
    """One way to compute the products of a shape, with what the library knows of the shape."""

    chosen: _Algorithm
    description: Handle
    weight: Handle
    x: Handle
    out: Handle
    beta: c_float


def algorithms(shape: Shape, others: Iterable[Algorithm] = ()) -> list[Algorithm]:
    """Those that the heuristics name, the likely fastest first; none for types not known here.

    Args:
        shape: what they compute.
        others: algorithms of shapes that differ in tokens alone; those that fit are added.

    Raises:
        OSError: torch has loaded no such library.
        RuntimeError: the library refused.
    """
    if shape.dtype not in _DATA_TYPES:
        return []
    library = _library()
    description = _new(library.cublasLtMatmulDescCreate, _COMPUTE_32F, _CUDA_R_32F)
    transposed = c_int32(_OP_T)
    _check(
        library.cublasLtMatmulDescSetAttribute(
            description, _MATMUL_DESC_TRANSA, _address(transposed), ctypes.sizeof(transposed)
        )
    )

    def layout(rows: int, columns: int) -> Handle:
        """Of a matrix whose columns follow one another: ours, transposed."""
        kind = _DATA_TYPES[shape.dtype]
        return _new(library.cublasLtMatrixLayoutCreate, kind, rows, columns, rows)

    weight, x = layout(shape.k, shape.features), layout(shape.k, shape.tokens)
    out = layout(shape.features, shape.tokens)
    beta = c_float(1.0 if shape.add else 0.0)
    found = {
        bytes(result.algo): Algorithm(result.algo, description, weight, x, out, beta)
        for limit in _WORKSPACE_LIMITS
        for result in _heuristics(description, weight, x, out, limit)
    }
    for other in others:
        candidate = Algorithm(other.chosen, description, weight, x, out, beta)
        if bytes(other.chosen) not in found and _fits(candidate):
            found[bytes(other.chosen)] = candidate
    return list(found.values())


def multiply(x: Tensor, weight: Tensor, out: Tensor, algorithm: Algorithm) -> Tensor:
    """Write `x @ weight.T` to `out`, or add it, as the algorithm's shape says; queues it only.

    Args:
        x: `[tokens, k]`, like the others contiguous and of the shape's type.
        weight: `[features, k]`.
        out: `[tokens, features]`.

    Returns:
        `out`.

    Raises:
        RuntimeError: the library refused.
    """
    workspace = _workspace(x.device)
    _check(
        _library().cublasLtMatmul(
            _handle(),
            algorithm.description,
            byref(c_float(1.0)),
            weight.data_ptr(),
            algorithm.weight,
            x.data_ptr(),
            algorithm.x,
            byref(algorithm.beta),
            out.data_ptr(),
            algorithm.out,
            out.data_ptr(),
            algorithm.out,
            byref(algorithm.chosen),
            workspace.data_ptr(),
            workspace.nbytes,
            torch.cuda.current_stream(x.device).cuda_stream,
        )
    )
    return out


def with_settings(algorithm: Algorithm, **settings: int) -> Algorithm | None:
    """The same with other `SETTINGS`; None if the library does not take them."""
    chosen = copy(algorithm.chosen)
    for name, value in settings.items():
        number, kind = SETTINGS[name]
        held = kind(value)
        if _library().cublasLtMatmulAlgoConfigSetAttribute(
            byref(chosen), number, _address(held), ctypes.sizeof(held)
        ):
            return None
    other = replace(algorithm, chosen=chosen)
    return other if _fits(other) else None


def _fits(algorithm: Algorithm) -> bool:
    """Whether an algorithm that the heuristics did not name for its shape can compute it."""
    result = _HeuristicResult()
    status = _library().cublasLtMatmulAlgoCheck(
        _handle(),
        algorithm.description,
        algorithm.weight,
        algorithm.x,
        algorithm.out,
        algorithm.out,
        byref(algorithm.chosen),
        byref(result),
    )
    ready: bool = status == 0 and result.state == 0
    return ready and result.workspace_size <= WORKSPACE_BYTES


def _heuristics(
    description: Handle, weight: Handle, x: Handle, out: Handle, workspace: int
) -> Iterator[_HeuristicResult]:
    library = _library()
    preference = _new(library.cublasLtMatmulPreferenceCreate)
    limit = c_uint64(workspace)
    _check(
        library.cublasLtMatmulPreferenceSetAttribute(
            preference, _PREF_MAX_WORKSPACE_BYTES, _address(limit), ctypes.sizeof(limit)
        )
    )
    results, count = (_HeuristicResult * _MAX_RESULTS)(), c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        _handle(),
        description,
        weight,
        x,
        out,
        out,
        preference,
        _MAX_RESULTS,
        results,
        byref(count),
    )
    _check(library.cublasLtMatmulPreferenceDestroy(preference))
    if status == 0:  # otherwise there is none for so little workspace
        yield from (result for result in results[: count.value] if result.state == 0)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


@cache
def _handle() -> Handle:
    return _new(_library().cublasLtCreate)


@cache
def _workspace(device: torch.device) -> Tensor:
    """Products of one stream share it: they run one after another."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _new(create: Any, *arguments: int) -> Handle:
    made = Handle()
    _check(create(byref(made), *arguments))
    return made


def _address(value: Any) -> Handle:
    return ctypes.cast(byref(value), Handle)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt answered with status {status}")
