"""Pooling: the vectors that workers compute from prompts, and the steps from vector to result."""

import json
from dataclasses import dataclass, fields

import numpy as np

from pagewire.packing import Float32Array

TASKS = ("embed", "score")
ACTIVATIONS = ("none", "normalize", "sigmoid")
PAIR_FORMATS = ("tokenizer", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """The pooling of a model; `Pooling` in worker.proto defines the fields."""

    task: str
    size: int
    activation: str
    whole_prompt: bool
    pair_format: str

    def __post_init__(self) -> None:
        """Raises ValueError for words that this version does not support, and for empty vectors."""
        for field, known in (
            ("task", TASKS),
            ("activation", ACTIVATIONS),
            ("pair_format", PAIR_FORMATS),
        ):
            if (given := getattr(self, field)) not in known:
                raise ValueError(f"its pooling has the {field} {given!r}, which is not known")
        if not self.size:
            raise ValueError("its pooling has the size 0")

    def to_bytes(self) -> bytes:
        """The fields, for another process of this version."""
        return json.dumps([getattr(self, field.name) for field in fields(self)]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ModelPooling":
        """The inverse of `to_bytes`."""
        return cls(*json.loads(data))

    def result(self, vector: Float32Array, dimensions: int | None) -> Float32Array:
        """The result `[dimensions or size]` of a worker's `vector [size]`.

        A Matryoshka embedding is cut first: its first numbers are an embedding of their own.
        """
        kept = vector if dimensions is None else vector[:dimensions]
        if self.activation == "normalize":
            # As torch.nn.functional.normalize, which does not divide by less than 1e-12.
            return kept / np.float32(max(float(np.linalg.norm(kept)), 1e-12))
        if self.activation == "sigmoid":
            # By the sign, so that the exponential does not overflow.
            small = np.exp(-np.abs(kept))
            return np.where(kept >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
        return kept
