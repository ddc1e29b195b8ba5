"""Rotary angles are those of transformers."""

from pathlib import Path

import pytest
import torch

from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.rotary_table import rope_tables
from support.models.tiny_models import VARIANTS, save_model


@pytest.mark.parametrize("variant", ["llama", "llama-rope3", "llama-linear", "qwen3"])
def test_rotary_angles_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    hf = save_model(tmp_path, variant)
    config = read_model_config(tmp_path)
    table = rope_tables(config, 300, torch.device("cpu"))[0]
    cos, sin = hf.model.rotary_emb(torch.zeros(1), torch.arange(300)[None])
    half = config.head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], atol=1e-5, rtol=0)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], atol=1e-5, rtol=0)


def test_every_rope_kind_is_among_the_variants() -> None:
    kinds = {v[1].get("rope_parameters", {}).get("rope_type") for v in VARIANTS.values()}
    assert kinds == {None, "llama3", "linear"}
