"""Arrays of token ids, slots and blocks as they travel: little-endian int32 bytes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
_WIRE = np.dtype("<i4")


def pack(values: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Integers as little-endian int32; raises OverflowError if one does not fit."""
    return np.asarray(values, dtype=_WIRE).tobytes()


def unpack(data: bytes) -> Int32Array:
    """The read-only int32 array [n] in `data`; ValueError if its size is not a multiple of 4."""
    return np.frombuffer(data, dtype=_WIRE)
