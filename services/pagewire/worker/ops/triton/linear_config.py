"""The kernel and tiles of a GEMM with few tokens.

The table was measured on an H200 (`benchmarks/kernels/pointwise.py --tune`). Each entry was timed
in a CUDA graph of all linear layers of a decode step, with separate weights for each layer: a
kernel that is timed alone finds part of its weights in the L2 cache and does not overlap with the
kernels around it. A shape without an entry is computed by cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.worker.ops.integers import next_power_of_2


@dataclass(frozen=True, slots=True)
class VectorConfig:
    """A matrix-vector program: `rows` weight rows, `block_k` columns at a time, `warps` warps.

    With more than one token `block_k` must cover a whole row. Gated GEMMs need two rows or more.
    """

    rows: int
    block_k: int
    warps: int


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """A skinny program: tiles of `rows` weight rows by `block_k`, of which `stages` are loading.

    `block_k` divides the length of a row.
    """

    rows: int
    block_k: int
    warps: int
    stages: int


Config = VectorConfig | SkinnyConfig
V, S = VectorConfig, SkinnyConfig

# Shape of the weight -> tokens, rounded up to a power of two -> kernel and tiles.
TABLE: dict[tuple[int, int], dict[int, Config]] = {
    # Qwen3-0.6B: QKV, attention output, gate and up, down, head.
    (4096, 1024): {
        1: V(4, 1024, 2),
        2: V(4, 1024, 2),
        4: V(4, 1024, 2),
        8: S(16, 256, 2, 8),
        16: S(32, 256, 4, 6),
        32: S(64, 128, 4, 6),
    },
    (1024, 2048): {
        1: V(2, 2048, 8),
        2: V(2, 2048, 2),
        4: V(4, 2048, 8),
        8: V(4, 2048, 8),
        16: S(16, 256, 2, 6),
        32: S(64, 128, 4, 6),
    },
    (6144, 1024): {
        1: V(4, 1024, 4),
        2: V(4, 1024, 2),
        4: S(16, 512, 2, 3),
        8: S(16, 512, 2, 3),
        16: S(64, 128, 4, 6),
        32: S(64, 128, 4, 6),
        64: S(64, 64, 4, 8),
    },
    (1024, 3072): {
        1: V(2, 4096, 8),
        2: V(2, 4096, 8),
        4: V(4, 4096, 8),
        8: S(16, 256, 2, 8),
        16: S(16, 256, 2, 6),
    },
    (151936, 1024): {
        1: V(4, 1024, 4),
        2: S(32, 128, 2, 5),
        4: S(32, 128, 2, 5),
        8: S(128, 128, 8, 3),
        16: S(64, 64, 4, 8),
        32: S(64, 64, 4, 8),
    },
    # Llama-3.1-8B, in the same order.
    (6144, 4096): {
        1: V(2, 2048, 8),
        2: S(16, 256, 2, 6),
        4: S(16, 256, 2, 6),
        8: S(16, 256, 2, 6),
        16: S(64, 128, 4, 6),
        32: S(64, 128, 4, 6),
    },
    (4096, 4096): {
        1: V(2, 1024, 1),
        2: S(16, 256, 2, 8),
        4: S(16, 256, 2, 8),
        8: S(16, 256, 2, 8),
        16: S(16, 256, 2, 6),
    },
    (28672, 4096): {
        1: V(2, 2048, 8),
        2: S(32, 128, 2, 5),
        4: S(32, 128, 2, 5),
        8: S(32, 128, 2, 5),
        16: S(64, 128, 4, 3),
        32: S(64, 128, 4, 3),
        64: S(128, 64, 8, 5),
    },
    (4096, 14336): {
        1: V(2, 2048, 4),
        2: S(32, 512, 4, 4),
        4: S(16, 256, 2, 8),
        8: S(16, 256, 2, 8),
        16: S(32, 256, 4, 6),
    },
    (128256, 4096): {
        1: V(4, 4096, 8),
        2: S(64, 256, 4, 4),
        4: S(64, 256, 4, 4),
        8: S(32, 128, 2, 5),
        16: S(32, 128, 2, 5),
        32: S(64, 64, 4, 8),
        64: S(128, 128, 8, 3),
    },
}


def linear_config(tokens: int, rows: int, k: int, item_size: int) -> Config | None:
    """Choose the kernel for a weight `[rows, k]`; None means cuBLAS.

    The matrix-vector kernel is compiled for an exact number of tokens, so it is used only for the
    numbers in the table. The skinny kernel is compiled for the next power of two.

    Args:
        tokens: rows of the input.
        rows, k: the shape of the weight.
        item_size: bytes of an element. The table applies to elements of two bytes.
    """
    entries = TABLE.get((rows, k), {}) if item_size == 2 else {}
    config = entries.get(next_power_of_2(tokens))
    if tokens == 1:
        return config or _any_vector(k)
    return None if isinstance(config, VectorConfig) and tokens not in entries else config


def _any_vector(k: int) -> VectorConfig:
    """Return tiles for one token and a weight without an entry: 16 to 32 weights a thread."""
    if k <= 1024:
        return VectorConfig(rows=4, block_k=1024, warps=4)
    return VectorConfig(rows=2, block_k=2048, warps=4)
