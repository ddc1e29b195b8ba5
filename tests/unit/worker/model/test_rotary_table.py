"""Rotary angles are those of transformers."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from pagewire.worker.model.config import parse_model_config, read_model_config
from pagewire.worker.model.config.rope import RopeKind
from pagewire.worker.model.rotary_table import rope_tables, rotary_order
from support.models.tiny_models import VARIANTS, save_model


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_rotary_angles_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    hf = save_model(tmp_path, variant)
    config = read_model_config(tmp_path)
    tables = rope_tables(config, 300, torch.device("cpu"))
    half, compared = config.head_dim // 2, 0
    for layer, (table, rope) in enumerate(zip(tables, config.ropes, strict=True)):
        if rope is None:
            assert table.equal(torch.cat((torch.ones(300, half), torch.zeros(300, half)), 1))
            continue
        cos, sin = angles_of(hf, layer, 300)
        rotated = rope.rotary_dim(config.head_dim) // 2
        first = slice(None, None, 2) if config.family.startswith("cohere") else slice(rotated)
        cos, sin = cos[0, :, first][:, :rotated], sin[0, :, first][:, :rotated]
        torch.testing.assert_close(table[:, :rotated], cos, atol=1e-5, rtol=0)
        torch.testing.assert_close(table[:, half : half + rotated], sin, atol=1e-5, rtol=0)
        assert table[:, rotated:half].eq(1).all()
        assert table[:, half + rotated :].eq(0).all()
        compared += 1
    assert compared


def angles_of(hf: Any, layer: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a layer in transformers, `[1, positions, rotary_dim]`."""
    rotary, at = hf.model.rotary_emb, torch.arange(positions)[None]
    if isinstance(rotary.rope_type, dict):
        return rotary(torch.zeros(1), at, hf.config.layer_types[layer])
    angles = rotary(torch.zeros(1), at)
    if isinstance(angles, torch.Tensor):  # DeepSeek V2 has complex numbers
        return angles.real, angles.imag
    return angles


def test_long_sequences_have_the_long_factors_of_longrope(tmp_path: Path) -> None:
    hf = save_model(tmp_path, "phi3-longrope", original_max_position_embeddings=100)
    config = read_model_config(tmp_path)
    for length in (100, 101):
        table = rope_tables(config, length, torch.device("cpu"))[0]
        cos, _ = angles_of(hf, 0, length)
        torch.testing.assert_close(table[:, :3], cos[0, :, :3], atol=1e-5, rtol=0)


def test_every_rope_kind_is_among_the_variants() -> None:
    kinds = {v[1].get("rope_parameters", {}).get("rope_type") for v in VARIANTS.values()}
    assert kinds - {None} == set(get_args(RopeKind)) - {"default"}


@pytest.mark.parametrize(
    ("family", "partial", "head_dim", "order"),
    [
        ("phi3", 1.0, 8, None),
        ("glm", 1.0, 8, [0, 2, 4, 6, 1, 3, 5, 7]),
        ("phi3", 0.5, 8, [0, 1, 4, 5, 2, 3, 6, 7]),
        ("glm", 0.5, 8, [0, 2, 4, 5, 1, 3, 6, 7]),
        # Padded to 16 values; 10 stands for a zero.
        ("phi3", 1.0, 10, [0, 1, 2, 3, 4, 10, 10, 10, 5, 6, 7, 8, 9, 10, 10, 10]),
        ("glm", 0.4, 10, [0, 2, 4, 5, 6, 7, 8, 9, 1, 3, 10, 10, 10, 10, 10, 10]),
    ],
)
def test_values_that_rotate_together_are_half_a_head_apart(
    family: str, partial: float, head_dim: int, order: list[int] | None
) -> None:
    raw = {"model_type": family, "head_dim": head_dim, "partial_rotary_factor": partial}
    raw |= {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = parse_model_config(raw | {"num_attention_heads": 2})
    if head_dim != 8:
        config = config.with_heads_for_kernels()
    found = rotary_order(config.ropes[0], config)
    assert (None if found is None else found.tolist()) == order
    assert head_dim != 8 or rotary_order(None, config) is None
