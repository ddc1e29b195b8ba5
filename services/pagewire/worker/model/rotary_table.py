"""The table of cosines and sines that the RoPE operations read."""

import math

import torch
from torch import Tensor

from pagewire.worker.model.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """`[max_positions, head_dim]` float32: cosines of the head_dim / 2 angles, then their sines.

    Angles are position times frequency, and the frequencies are `theta ** (-2 i / head_dim)` (Su
    et al., 2021, "RoFormer"), scaled as `rope.kind` says.
    """
    frequencies = _frequencies(rope, head_dim).to(device)  # [head_dim / 2]
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept.

    Between `original / high_freq_factor` and `original / low_freq_factor` tokens of wavelength
    the two are blended linearly in `original / wavelength` (Llama Team, 2024, "The Llama 3 Herd
    of Models", and the reference code of that model).
    """
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)
