"""A worker's vectors are those of transformers, with any chunks of the prompts."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.packing import pack
from pagewire.v1 import worker_pb2 as pb
from support.models.pooling_models import (
    add_modules,
    classified,
    pooled,
    save_classifier,
    save_headless,
    save_tokenizer,
    yes_probability,
)
from support.models.quantized_models import (
    compressed_tensors,
    quantize_saved,
    save_quantized,
)
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import VARIANTS, VOCAB, save_model

LENGTHS = (1, 5, 16, 33, 80)
TOLERANCE = {"rtol": 0, "atol": 1e-5}
OLD_FLAGS = {
    "word_embedding_dimension": 64,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_lasttoken": False,
    "include_prompt": True,
}

FOUR_BITS = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
FOUR_BITS |= {"strategy": "group", "group_size": 32}


def prompts(vocab: int = VOCAB) -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(vocab) for _ in range(length)] for length in LENGTHS]


async def vectors(
    folder: Path, chunks: tuple[int, ...] = (1 << 20, 7, 50), **settings: Any
) -> list[list[list[float]]]:
    """The vectors of all prompts, in steps of whole prompts and in steps with shorter chunks."""
    found = []
    async with local_worker(folder, **settings) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        for chunk in chunks:
            sequences = [Sequence(prompt, 1) for prompt in prompts()]
            await driver.run(sequences, chunk=chunk, run_ahead=3)
            assert not any(sequence.failure for sequence in sequences)
            found.append([sequence.vector for sequence in sequences])
        assert not worker.fatal
    return found


def check(found: list[list[list[float]]], expected: list[torch.Tensor]) -> None:
    """Compares vectors relative to their length."""
    for each in found:
        for vector, wanted in zip(each, expected, strict=True):
            length = wanted.norm()
            torch.testing.assert_close(torch.tensor(vector) / length, wanted / length, **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
async def test_vectors_are_those_of_transformers(tmp_path: Path, variant: str, kind: str) -> None:
    model = save_model(tmp_path, variant)
    flag = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}[kind]
    add_modules(tmp_path, OLD_FLAGS | {f"pooling_mode_{flag}": True}, normalize=False)
    check(await vectors(tmp_path), [pooled(model, prompt, kind) for prompt in prompts()])


async def test_a_decoder_without_a_head_embeds(tmp_path: Path) -> None:
    model = save_model(tmp_path / "causal", "qwen3")
    save_headless(tmp_path / "headless", model)
    expected = [pooled(model, prompt, "last") for prompt in prompts()]
    check(await vectors(tmp_path / "headless"), expected)
    check(await vectors(tmp_path / "causal", task="embed"), expected)


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "qwen3"])
async def test_scores_of_classifiers_are_those_of_transformers(
    tmp_path: Path, variant: str
) -> None:
    model = save_classifier(tmp_path, variant)
    expected = [torch.tensor([classified(model, prompt)]) for prompt in prompts()]
    assert len({round(float(logit), 3) for logit in expected}) == len(LENGTHS)
    # One logit is a sum that may cancel, so the scale is the size of all logits together.
    found = [[[logit for [logit] in each]] for each in await vectors(tmp_path)]
    check(found, [torch.cat(expected)])


@pytest.mark.parametrize("variant", ["qwen3", "qwen3-tied"])
async def test_the_score_of_two_tokens_is_the_difference_of_their_logits(
    tmp_path: Path, variant: str
) -> None:
    model = save_model(tmp_path, variant, vocab_size=512)
    tokenizer = save_tokenizer(tmp_path)
    yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
    wanted = [yes_probability(model, prompt, yes, no) for prompt in prompts()]
    [found] = await vectors(tmp_path, chunks=(7,), task="score")
    got = torch.tensor(found).squeeze(1).sigmoid()
    torch.testing.assert_close(got, torch.tensor(wanted), **TOLERANCE)
    assert 0.001 < min(wanted) < 0.5 < max(wanted)


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
async def test_bfloat16_is_as_near_as_that_of_transformers(tmp_path: Path, kind: str) -> None:
    model = save_model(tmp_path, "qwen3", initializer_range=0.1)
    mode = {"last": "lasttoken", "mean": "mean", "cls": "cls"}[kind]
    add_modules(tmp_path, {"pooling_mode": mode}, normalize=True)
    expected = [pooled(model, prompt, kind) for prompt in prompts()]
    [found] = await vectors(tmp_path, chunks=(30,), dtype="bfloat16")
    rounded = model.to(torch.bfloat16)
    theirs = [pooled(rounded, prompt, kind).float() for prompt in prompts()]
    for vector, their, wanted in zip(found, theirs, expected, strict=True):
        error = (torch.tensor(vector) - wanted).norm() / wanted.norm()
        assert 0 < error < 2 * (their - wanted).norm() / wanted.norm()


@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
async def test_the_warm_up_measures_costs(tmp_path: Path, mode: str) -> None:
    """The timed steps also begin in the middle of a prompt."""
    model = save_model(tmp_path, "llama")
    add_modules(tmp_path, {"pooling_mode": mode}, normalize=True)
    kind = {"lasttoken": "last", "mean": "mean"}[mode]
    async with local_worker(tmp_path, host_memory_gb=0.001) as worker:
        worker.loaded.backend.warm_up()
        assert worker.loaded.backend.host_costs is not None
        driver = StepDriver(worker.stream(), worker.limits)
        sequence = Sequence(prompts()[4], 1)
        await driver.run([sequence], chunk=30)
    check([[sequence.vector]], [pooled(model, prompts()[4], kind)])


async def test_a_bad_prompt_fails_alone(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")
    add_modules(tmp_path, {"pooling_mode": "mean"}, normalize=True)
    good, bad = prompts()[3], [VOCAB + 7]
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        sequences = [Sequence(good, 1), Sequence(bad, 1), Sequence(good, 1)]
        await driver.run(sequences, chunk=20)
    assert [bool(sequence.failure) for sequence in sequences] == [False, True, False]
    expected = pooled(model, good, "mean")
    check([[sequences[0].vector, sequences[2].vector]], [expected, expected])


async def test_a_mean_refuses_computed_tokens(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    add_modules(tmp_path, {"pooling_mode": "mean"}, normalize=True)
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        start = driver._start(Sequence(prompts()[3], 1))
        start.num_computed, start.blocks = 16, pack([1, 2, 3])
        step = pb.Step(starts=[start], prefill_slots=pack([start.slot]), prefill_counts=pack([17]))
        await driver._send(step)
        result = await driver.stream.receive()
    [error] = result.errors
    assert "num_computed must be 0" in error.message


async def test_a_prompt_without_finite_states_fails(tmp_path: Path) -> None:
    model = save_model(tmp_path, "llama")
    add_modules(tmp_path, {"pooling_mode": "lasttoken"}, normalize=True)
    with torch.no_grad():
        model.model.embed_tokens.weight[11] = float("nan")
    model.save_pretrained(tmp_path)
    async with local_worker(tmp_path) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        sequences = [Sequence([5, 6], 1), Sequence([5, 11], 1)]
        await driver.run(sequences)
    assert not sequences[0].failure
    assert "hidden states for this prompt are not finite" in sequences[1].failure


@pytest.mark.parametrize("headless", [False, True])
async def test_quantized_embeddings(tmp_path: Path, headless: bool) -> None:
    """Tensors of a quantized head are not read, and names may lack their first part."""
    form = compressed_tensors(FOUR_BITS, None, "pack-quantized", ignore=[])
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    model = save_quantized(tmp_path, "llama", form, skip=("none",), **sizes)
    if headless:
        tensors = load_file(tmp_path / "model.safetensors")
        decoder = {name: x for name, x in tensors.items() if not name.startswith("lm_head.")}
        renamed = {name.removeprefix("model."): x for name, x in decoder.items()}
        save_file(renamed, tmp_path / "model.safetensors")
    expected = [pooled(model, prompt, "last") for prompt in prompts()]
    check(await vectors(tmp_path, task="embed"), expected)


async def test_scores_of_quantized_classifiers(tmp_path: Path) -> None:
    form = compressed_tensors(FOUR_BITS, None, "pack-quantized", ignore=["score"])
    model = save_classifier(tmp_path, "qwen3", hidden_size=128, intermediate_size=256)
    quantize_saved(tmp_path, model, form, skip=("score",))
    expected = torch.tensor([classified(model, prompt) for prompt in prompts()])
    for found in await vectors(tmp_path):
        torch.testing.assert_close(torch.tensor(found).squeeze(1), expected, rtol=1e-4, atol=1e-4)


async def test_embeddings_are_quantized_by_a_setting(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3")
    found = await vectors(tmp_path, (50,), task="embed", quantization="int8")
    for vector, prompt in zip(found[0], prompts(), strict=True):
        expected = pooled(model, prompt, "last")
        near = torch.cosine_similarity(torch.tensor(vector), expected, dim=0)
        assert 0.98 < near < 0.999999
