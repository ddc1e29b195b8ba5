"""Rotary angles are those of transformers."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from pagewire.worker.model.config import RopeConfig, read_model_config
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
    """Cosines and sines of a layer by transformers, `[1, positions, rotary_dim]`."""
    rotary, at = hf.model.rotary_emb, torch.arange(positions)[None]
    if isinstance(rotary.rope_type, dict):
        return rotary(torch.zeros(1), at, hf.config.layer_types[layer])
    return rotary(torch.zeros(1), at)


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
    ("partial", "interleaved", "order"),
    [
        (1.0, False, None),
        (1.0, True, [0, 2, 4, 6, 1, 3, 5, 7]),
        (0.5, False, [0, 1, 4, 5, 2, 3, 6, 7]),
        (0.5, True, [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_values_that_rotate_together_are_half_a_head_apart(
    partial: float, interleaved: bool, order: list[int] | None
) -> None:
    found = rotary_order(RopeConfig("default", 1e4, partial=partial), 8, interleaved)
    assert (None if found is None else found.tolist()) == order
    assert rotary_order(None, 8, interleaved) is None
