"""The graph backend on a GPU computes quantized weights like plain torch on the CPU."""

import asyncio
import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from support.models.quantized_experts import save_mxfp4, save_quantized_experts
from support.models.quantized_models import Format, awq, gptq, save_quantized
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import greedy_tokens, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

COUNT = 32
SIZES = {"hidden_size": 128, "intermediate_size": 256}
PROMPTS = [[(7 * i + start) % 199 for i in range(start + 5)] for start in (0, 11, 40, 90)]


@pytest.mark.parametrize(
    "form",
    [awq(32), gptq(4, 32, symmetric=True, order=True), gptq(8, 32, symmetric=False)],
    ids=["awq", "gptq", "gptq in eight bits"],
)
def test_greedy_tokens_equal_those_of_torch(tmp_path: Path, form: Format) -> None:
    model = save_quantized(tmp_path, "qwen3", form, **SIZES)
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in PROMPTS]

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "float32", "num_slots": 5}
        async with local_worker(tmp_path, **settings) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            sequences = [Sequence(prompt, COUNT) for prompt in PROMPTS]
            assert await driver.run(sequences, chunk=9, run_ahead=3) == expected
            assert not worker.fatal

    asyncio.run(check())


@pytest.mark.parametrize(
    "form", [awq(128), gptq(4, 128, symmetric=True, order=True)], ids=["awq", "gptq"]
)
def test_greedy_tokens_of_weights_that_hopper_arranges(tmp_path: Path, form: Format) -> None:
    """Groups of 128 in float16: no token is farther from the best than rounding can explain.

    All prompts together have steps of several tokens; each alone has steps of one token.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.2}
    model = save_quantized(tmp_path, "qwen3", form, **sizes)
    half = copy.deepcopy(model).half()

    def check_answer(prompt: list[int], tokens: list[int]) -> None:
        assert len(tokens) == COUNT
        logits = answer_logits(model, prompt, tokens)
        rounding = (answer_logits(half, prompt, tokens) - logits).abs().max()
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(1).values - chosen).max() <= 2 * rounding

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "float16", "num_slots": 5}
        async with local_worker(tmp_path, **settings) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            sequences = [Sequence(prompt, COUNT) for prompt in PROMPTS]
            together = await driver.run(sequences, chunk=9, run_ahead=3)
            for prompt, tokens in zip(PROMPTS, together, strict=True):
                check_answer(prompt, tokens)
                [alone] = await driver.run([Sequence(prompt, COUNT)], run_ahead=3)
                check_answer(prompt, alone)
            assert not worker.fatal

    asyncio.run(check())


def answer_logits(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> Tensor:
    """The logits of transformers for each of `tokens`, `[tokens, vocabulary]`."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1].float()


@pytest.mark.parametrize("form", [awq(32), None], ids=["awq", "mxfp4"])
def test_greedy_tokens_of_quantized_experts(tmp_path: Path, form: Format | None) -> None:
    if form is None:
        sizes = {"hidden_size": 160, "intermediate_size": 96, "initializer_range": 0.1}
        # Older versions of transformers, as 5.17, ignore the field: their limit is 7.
        model = save_mxfp4(tmp_path, **sizes, swiglu_limit=7.0)
    else:
        sizes = {"moe_intermediate_size": 64, "initializer_range": 0.1}
        model = save_quantized_experts(tmp_path, "qwen3-moe", form, **SIZES, **sizes)
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in PROMPTS]

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "float32", "num_slots": 5}
        async with local_worker(tmp_path, **settings) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            sequences = [Sequence(prompt, COUNT) for prompt in PROMPTS]
            assert await driver.run(sequences, chunk=9, run_ahead=3) == expected
            assert not worker.fatal

    asyncio.run(check())


@pytest.mark.parametrize("variant", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_a_sequence_that_runs_again_has_the_same_tokens(
    tmp_path: Path, quantization: str, variant: str
) -> None:
    """In graphs of decode steps and of chunks, with weights and inputs in eight bits."""
    save_model(tmp_path, variant, **SIZES)

    async def check() -> None:
        settings = {"device": "cuda", "dtype": "bfloat16", "num_slots": 5}
        settings |= {"quantization": quantization}
        async with local_worker(tmp_path, **settings) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            runs = [
                await driver.run([Sequence(prompt, COUNT) for prompt in PROMPTS], run_ahead=3)
                for _ in range(2)
            ]
            assert runs[0] == runs[1]
            assert len({tuple(tokens) for tokens in runs[0]}) == len(PROMPTS)
            assert not worker.fatal

    asyncio.run(check())
