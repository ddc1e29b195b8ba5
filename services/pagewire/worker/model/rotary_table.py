"""The tables of cosines and sines that the RoPE operations read, and the order of a head's values.

The operations rotate value i of a head with value `i + head_dim / 2`. For a model that pairs other
values, or rotates only some, loading the weights changes the order of a head's values
(`rotary_order`). The same order in queries and keys does not change their products. Values that are
not rotated have a cosine of 1 and a sine of 0. Heads may be padded with zeros, see
`ModelConfig.with_heads_for_kernels`.
"""

import math

import torch
from torch import Tensor

from pagewire.worker.model.config import ModelConfig, RopeConfig


def rope_tables(
    config: ModelConfig, max_positions: int, device: torch.device
) -> tuple[Tensor, ...]:
    """The `rope_table` of each layer. Layers with the same RoPE share one tensor."""
    tables = {
        rope: rope_table(rope, config, max_positions, device)
        for rope in dict.fromkeys(config.ropes)
    }
    return tuple(tables[rope] for rope in config.ropes)


def rope_table(
    rope: RopeConfig | None, config: ModelConfig, max_positions: int, device: torch.device
) -> Tensor:
    """`[max_positions, served_head_dim]` float32: cosines of a head's angles, then their sines.

    Angles are position times frequency, and the frequencies are `theta ** (-2 i / rotary_dim)` (Su
    et al., 2021, "RoFormer"), scaled as `rope.kind` says. None rotates nothing. `longrope` uses its
    long factors if `max_positions` exceeds the original length. The choice is the same for all
    sequences, so a sequence's keys do not change while the sequence grows.
    """
    half = config.served_head_dim // 2
    table = torch.zeros(max_positions, 2 * half, device=device)
    table[:, :half] = 1.0
    if rope is None:
        return table
    frequencies = _frequencies(rope, config.head_dim, max_positions).to(device)  # [rotary_dim / 2]
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    rotated = len(frequencies)
    table[:, :rotated] = angles.cos() * rope.attention_factor
    table[:, half : half + rotated] = angles.sin() * rope.attention_factor
    return table


def rotary_order(rope: RopeConfig | None, config: ModelConfig) -> Tensor | None:
    """For each place of a served head, the index of the model's value, `[served_head_dim]`.

    The index `head_dim` stands for a zero. None: each value stays at its place.
    """
    size, half = config.head_dim, config.served_head_dim // 2
    rotated = 0 if rope is None else rope.rotary_dim(size)
    values = torch.arange(rotated)
    first, second = (values[::2], values[1::2]) if config.interleaved else values.chunk(2)
    rest = torch.arange(rotated, config.served_head_dim).clamp(max=size)
    left, right = rest.split([half - len(first), half - len(second)])
    order = torch.cat((first, left, second, right))
    return None if order.equal(torch.arange(size)) else order


def _frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    rotated = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(frequencies, rope)
        case "yarn":
            return _yarn(frequencies, rope)
        case "longrope":
            long = max_positions > rope.original_max_position_embeddings
            return frequencies / torch.tensor(rope.long_factors if long else rope.short_factors)
    # `dynamic` scales only sequences longer than max_position_embeddings, and no sequence is.
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept.

    For wavelengths between `original / high_freq_factor` and `original / low_freq_factor` tokens,
    the two are blended linearly in `original / wavelength` (Llama Team, 2024, "The Llama 3 Herd
    of Models", and the reference code of that model).
    """
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN: frequencies of few turns divided by `factor`, those of many turns kept.

    Frequency number i turns `beta` times within the original length at
    `i = rotary_dim * log(original / (2 pi beta)) / (2 log theta)`. From the number of `beta_fast`
    to that of `beta_slow` the two are blended linearly (Peng et al., 2023, "YaRN").
    """
    rotated = 2 * len(frequencies)

    def number(beta: float) -> float:
        turns = rope.original_max_position_embeddings / (2 * math.pi * beta)
        return rotated * math.log(turns) / (2 * math.log(rope.theta))

    low, high = number(rope.beta_fast), number(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    span = high - low or 0.001
    scaled = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / span).clamp(0, 1)
    kept = 1 - scaled
    return frequencies / rope.factor * (1 - kept) + frequencies * kept
