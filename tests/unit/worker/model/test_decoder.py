"""Logits in half precision are no further from those in float32 than transformers' own."""

import copy
import random
from pathlib import Path

import pytest
import torch

from support.models.plain_logits import error, load_decoder, prompt_logits
from support.models.tiny_models import VARIANTS, VOCAB, save_model

PROMPTS, LENGTH = 6, 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_error_is_within_that_of_transformers(
    tmp_path: Path, variant: str, dtype: torch.dtype
) -> None:
    model = save_model(tmp_path, variant)
    rounded = copy.deepcopy(model).to(dtype)
    generator = random.Random(1)
    prompts = [[generator.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(PROMPTS)]
    with torch.no_grad():
        exact = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
        theirs = [rounded(torch.tensor([prompt])).logits[0].float() for prompt in prompts]
    half = load_decoder(tmp_path, dtype, LENGTH)
    full = load_decoder(tmp_path, torch.float32, LENGTH)
    ours = [prompt_logits(half, prompt) for prompt in prompts]
    whole = [prompt_logits(full, prompt) for prompt in prompts]
    assert error(whole, exact) < 1e-4
    assert 0 < error(ours, exact) < error(theirs, exact)
