"""Little-endian arrays in messages: token ids, slots and blocks as int32, floats as float32, counts
and stream numbers as uint32."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
UInt32Array = NDArray[np.uint32]
Float32Array = NDArray[np.float32]
_WIRE = np.dtype("<i4")
_UNSIGNED_WIRE = np.dtype("<u4")
_FLOAT_WIRE = np.dtype("<f4")


def pack(values: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Integers as little-endian int32. OverflowError if a Python integer does not fit; items of an
    array are not checked."""
    return np.asarray(values, dtype=_WIRE).tobytes()


def unpack(data: bytes) -> Int32Array:
    """The read-only int32 array [n] in `data`; ValueError if its size is not a multiple of 4."""
    return np.frombuffer(data, dtype=_WIRE)


def pack_unsigned(values: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Integers as little-endian uint32."""
    return np.asarray(values, dtype=_UNSIGNED_WIRE).tobytes()


def unpack_unsigned(data: bytes) -> UInt32Array:
    """The read-only uint32 array [n] in `data`; ValueError if its size is not a multiple of 4."""
    return np.frombuffer(data, dtype=_UNSIGNED_WIRE)


def pack_floats(values: Float32Array) -> bytes:
    """Numbers as little-endian float32."""
    return np.asarray(values, dtype=_FLOAT_WIRE).tobytes()


def unpack_floats(data: bytes) -> Float32Array:
    """The read-only float32 array [n] in `data`; ValueError if its size is not a multiple of 4."""
    return np.frombuffer(data, dtype=_FLOAT_WIRE)
