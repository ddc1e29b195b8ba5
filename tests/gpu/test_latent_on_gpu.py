"""Latent attention on a GPU, in graphs and in the sizes of DeepSeek V2 and V3.

`test_parity_on_gpu` compares the tiny variants; the sizes of attention decide which kernels run.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models.copied_start import BLOCK_SIZE, run_copied_start
from support.models.plain_logits import error, load_decoder, prompt_logits
from support.models.saved_blocks import COUNT as SAVED
from support.models.saved_blocks import run_saved_and_loaded
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, greedy_tokens, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

COUNT = 40
LENGTHS = (1, 17, 80, 300)
SETTINGS = {"device": "cuda", "dtype": "float32", "num_slots": 9}


def of_full_size(heads: int) -> dict[str, Any]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }


def draw(*lengths: int) -> list[list[int]]:
    generator = random.Random(4)
    return [[generator.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    ("variant", "heads"), [("deepseek-v2-lite", 16), ("deepseek-v2", 32), ("deepseek-v3", 64)]
)
def test_greedy_tokens_equal_those_of_transformers(
    tmp_path: Path, variant: str, heads: int
) -> None:
    # No two likeliest tokens are nearer than 0.007.
    sizes = of_full_size(heads) | {"hidden_size": 256, "initializer_range": 0.2}
    model = save_model(tmp_path, variant, **sizes)
    prompts = draw(*LENGTHS)
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in prompts]

    async def check() -> None:
        async with local_worker(tmp_path, **SETTINGS) as worker:
            assert not worker.loaded.backend.prefix_groups
            driver = StepDriver(worker.stream(), worker.limits)
            chunked = [Sequence(prompt, COUNT) for prompt in prompts]
            assert await driver.run(chunked, chunk=70, run_ahead=3) == expected
            alone = await driver.run([Sequence(prompts[2], COUNT)], run_ahead=4)
            assert alone == [expected[2]]
            assert not worker.fatal

    asyncio.run(check())


@pytest.mark.parametrize("heads", [16, 128])
def test_logits_in_bfloat16_are_near_those_in_float32(tmp_path: Path, heads: int) -> None:
    """Prefill on tensor cores. Without experts, because another expert changes a token more."""
    sizes = of_full_size(heads) | {"hidden_size": 256, "initializer_range": 0.1}
    save_model(tmp_path, "deepseek-v3", **sizes, first_k_dense_replace=3)
    prompts = draw(200, 200)
    exact, found = (
        [prompt_logits(load_decoder(tmp_path, dtype, 200), prompt) for prompt in prompts]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0 < error(found, exact) < 0.05


def test_a_sequence_starts_with_a_copied_block(tmp_path: Path) -> None:
    """The step copies the block before its graphs are launched."""
    model = save_model(tmp_path, "deepseek-v3")
    (ours,) = draw(45)
    theirs = [*ours[:-1], (ours[-1] + 1) % VOCAB]

    async def check() -> None:
        async with local_worker(tmp_path, block_size=BLOCK_SIZE, **SETTINGS) as worker:
            outputs = await run_copied_start(worker, ours, theirs)
            assert outputs == (greedy_tokens(model, ours, 11), greedy_tokens(model, theirs, 9))
            assert not worker.fatal

    asyncio.run(check())


def test_saved_blocks_come_back(tmp_path: Path) -> None:
    model = save_model(tmp_path, "deepseek-v2")
    ours, theirs = draw(40, 38)
    block_bytes = 3 * 16 * 48 * 4  # layers, tokens, values, bytes

    async def check() -> None:
        settings = SETTINGS | {"host_memory_gb": 6.5 * block_bytes / 1e9}
        async with local_worker(tmp_path, **settings) as worker:
            back, other, strange = await run_saved_and_loaded(worker, ours, theirs)
            assert not worker.fatal
        assert back == greedy_tokens(model, ours, SAVED)
        assert other == greedy_tokens(model, theirs, SAVED)
        assert strange != back, "what was not loaded was not needed"

    asyncio.run(check())
