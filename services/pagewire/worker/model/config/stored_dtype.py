"""The type in which a checkpoint keeps its weights, read from the head of its first file."""

import json
import struct
from pathlib import Path

_HEAD = struct.Struct("<Q")
# The largest header that safetensors allows. The header describes a file's tensors.
_MAX_HEADER_BYTES = 100_000_000
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def stored_dtype(folder: Path) -> str | None:
    """The type of the first tensor in `folder` with a supported type.

    None without such a tensor, or if a file cannot be read: loading the weights reports that.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        return None
    try:
        with files[0].open("rb") as file:
            (size,) = _HEAD.unpack(file.read(_HEAD.size))
            if size > _MAX_HEADER_BYTES:
                return None
            tensors = json.loads(file.read(size))
        dtypes = (tensor.get("dtype") for tensor in tensors.values())
        return next((_NAMES[dtype] for dtype in dtypes if dtype in _NAMES), None)
    except (OSError, ValueError, AttributeError, struct.error):
        return None
