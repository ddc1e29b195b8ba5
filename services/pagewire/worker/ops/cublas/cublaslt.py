"""Bindings of cuBLASLt: list the algorithms of a GEMM and run one of them.

torch always uses the first algorithm that the library's heuristic lists. Names and numbers here
are those of `cublasLt.h`. The library is the one that torch has loaded.
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

# The workspace that torch gives cuBLAS on Hopper.
WORKSPACE_BYTES = 32 << 20
# Addresses of matrices must be multiples of this many bytes, as the heuristic assumes.
ALIGNMENT = 256

# With less workspace the heuristic lists other algorithms.
_WORKSPACE_LIMITS = (WORKSPACE_BYTES, WORKSPACE_BYTES // 8, 0)
# The heuristic lists this many at most: cuBLAS 13.1 returned no more when asked for 256.
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
    "cublasLtGetVersion": [],
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
    """A GEMM `x [tokens, k] @ weight [features, k].T`.

    `add`: the result is added to the output instead of replacing it.
    """

    tokens: int
    features: int
    k: int
    dtype: torch.dtype
    add: bool


@dataclass(frozen=True, slots=True, eq=False)
class Algorithm:
    """One way to compute the GEMMs of a shape, with the library's descriptors of that shape."""

    chosen: _Algorithm
    description: Handle
    weight: Handle
    x: Handle
    out: Handle
    beta: c_float


def algorithms(shape: Shape, others: Iterable[Algorithm] = ()) -> list[Algorithm]:
    """Return the algorithms that the heuristic lists, the likely fastest first.

    Args:
        shape: the GEMM. The list is empty for dtypes other than bfloat16 and float16.
        others: algorithms of shapes that differ in tokens only. Those that can compute this shape
            are appended.

    Raises:
        OSError: there is no cuBLASLt library of torch's CUDA version.
        RuntimeError: the library returned an error.
    """
    if shape.dtype not in _DATA_TYPES:
        return []
    described = _describe(shape)
    found = {
        bytes(result.algo): replace(described, chosen=result.algo)
        for limit in _WORKSPACE_LIMITS
        for result in _heuristics(described, limit)
    }
    for other in others:
        candidate = replace(described, chosen=other.chosen)
        if bytes(other.chosen) not in found and _fits(candidate):
            found[bytes(other.chosen)] = candidate
    return list(found.values())


def algorithm_of(shape: Shape, chosen: bytes) -> Algorithm | None:
    """Return the algorithm with these bytes of an earlier one's `chosen`.

    None if the library does not support it for `shape`. Only the same version of the library gives
    the bytes the same meaning.

    Raises:
        OSError, RuntimeError: as `algorithms`.
    """
    if shape.dtype not in _DATA_TYPES or len(chosen) != ctypes.sizeof(_Algorithm):
        return None
    algorithm = replace(_describe(shape), chosen=_Algorithm.from_buffer_copy(chosen))
    return algorithm if _fits(algorithm) else None


def library_version() -> int:
    """Return the version of the library; OSError if there is none."""
    return int(_library().cublasLtGetVersion())


def _describe(shape: Shape) -> Algorithm:
    """Return the descriptors of a shape, with an algorithm that is not set yet."""
    library = _library()
    description = _new(library.cublasLtMatmulDescCreate, _COMPUTE_32F, _CUDA_R_32F)
    transposed = c_int32(_OP_T)
    _check(
        library.cublasLtMatmulDescSetAttribute(
            description, _MATMUL_DESC_TRANSA, _address(transposed), ctypes.sizeof(transposed)
        )
    )

    def layout(rows: int, columns: int) -> Handle:
        """Describe a column-major matrix, which is the transpose of a row-major tensor."""
        kind = _DATA_TYPES[shape.dtype]
        return _new(library.cublasLtMatrixLayoutCreate, kind, rows, columns, rows)

    return Algorithm(
        chosen=_Algorithm(),
        description=description,
        weight=layout(shape.k, shape.features),
        x=layout(shape.k, shape.tokens),
        out=layout(shape.features, shape.tokens),
        beta=c_float(1.0 if shape.add else 0.0),
    )


def multiply(x: Tensor, weight: Tensor, out: Tensor, algorithm: Algorithm) -> Tensor:
    """Queue `x @ weight.T` on the current stream; it is written or added to `out`.

    All tensors are contiguous and have the dtype of the algorithm's shape.

    Args:
        x: `[tokens, k]`.
        weight: `[features, k]`.
        out: `[tokens, features]`; the result is added to it if the shape has `add`.
        algorithm: one for exactly this shape.

    Returns:
        `out`.

    Raises:
        RuntimeError: the library returned an error.
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
    """Return the algorithm with other `SETTINGS`; None if the library does not support them."""
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
    """Tell whether the library can run an algorithm that its heuristic did not list."""
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


def _heuristics(described: Algorithm, workspace: int) -> Iterator[_HeuristicResult]:
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
        described.description,
        described.weight,
        described.x,
        described.out,
        described.out,
        preference,
        _MAX_RESULTS,
        results,
        byref(count),
    )
    _check(library.cublasLtMatmulPreferenceDestroy(preference))
    if status == 0:  # otherwise no algorithm needs so little workspace
        yield from (result for result in results[: count.value] if result.state == 0)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    library.cublasLtGetVersion.restype = c_size_t
    return library


@cache
def _handle() -> Handle:
    return _new(_library().cublasLtCreate)


@cache
def _workspace(device: torch.device) -> Tensor:
    """Return one workspace for all GEMMs of a device: those of one stream do not overlap."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _new(create: Any, *arguments: int) -> Handle:
    handle = Handle()
    _check(create(byref(handle), *arguments))
    return handle


def _address(value: Any) -> Handle:
    return ctypes.cast(byref(value), Handle)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt returned status {status}")
