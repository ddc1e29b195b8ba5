"""Drafts on a GPU change only the number of steps of an answer.

With `--batch-invariant` tokens and log probabilities have the same bits with and without drafts.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.packing import pack, pack_floats
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.speculation.recent_outputs import MAX_SALTS
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from support.eagle_drafts import check_drafts, four_drafts
from support.eagle_heads import ReferenceHead, save_head
from support.models.one_answer import (
    SIZES,
    VOCABULARY,
    Answer,
    Wanted,
    answers,
    preempted_answers,
)
from support.models.step_driver import LocalWorker, StepDriver, local_worker
from support.models.tiny_models import VOCAB, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

SETTINGS = {
    "device": "cuda",
    "num_slots": 48,
    "num_blocks": 4000,
    "max_model_len": 4096,
    "worker_max_num_batched_tokens": 2048,
}
COUNT = 60
LIKELY = [5, 90, 91, 900]
DRAFTERS = ("suffix", "prediction", "draft_model", "recent")


def drawn(generator: random.Random, length: int, number: int) -> Wanted:
    """A request: greedy, sampled, with filters, with penalties or bans, by its number.

    Few tokens are likely, so that drafts are right and wrong.
    """
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"min_tokens": 30, "stop_token_ids": [5, 90]},
        {"temperature": 0.5, "min_p": 0.02},
    ]
    biases = pack_floats(np.array([14.0] * len(LIKELY), np.float32))
    fields = {"top_p": 1.0, "seed": 1000 + number, "bias_ids": pack(LIKELY), "biases": biases}
    sampling = pb.SlotSampling(logprobs=(0, 3, 20)[number % 3], **fields | kinds[number % 6])
    period = [generator.randrange(VOCABULARY) for _ in range(1 + number % 40)]
    return Wanted((period * length)[:length], COUNT - number % 7, sampling)


def requests(told: list[Answer] | None = None) -> list[Wanted]:
    """The requests; every third one predicts an edited answer if all answers are `told`."""
    generator = random.Random(11)
    made = [drawn(generator, 3 + 29 * number, number) for number in range(42)]
    if told is None:
        return made
    return [
        request if number % 3 else replace(request, prediction=edited(answer.tokens))
        for number, (request, answer) in enumerate(zip(made, told, strict=True))
    ]


def edited(tokens: list[int]) -> list[int]:
    """The tokens with one replaced, some left out and some inserted."""
    return [*tokens[:12], 7, *tokens[13:20], *tokens[24:40], 8, 9, *tokens[40:]]


def run(
    folder: Path, speculate: str, told: list[Answer] | None = None, **settings: Any
) -> tuple[list[list[Answer]], dict[str, float]]:
    """The answers alone, preempted, all at once, a few at a time, and again with the last salts.

    Also returns the numbers of right drafts, by drafter.
    """
    found: list[list[Answer]] = []
    right: dict[str, float] = {}

    async def on_a_worker() -> None:
        async with local_worker(folder, speculate=speculate, **SETTINGS | settings) as worker:
            draft_whenever_possible(worker)
            driver = StepDriver(worker.stream(), worker.limits)
            wanted = requests(told)
            found.append(await answers(driver, salted(wanted[:8], "alone"), at_once=1))
            found.append(await preempted_answers(driver, salted(wanted, "preempted"), 20))
            found.append(await answers(driver, salted(wanted, "all"), chunk=100))
            found.append(await answers(driver, salted(wanted, "few"), at_once=6, run_ahead=3))
            recent = worker.engine.metrics.drafts.value("recent", "accepted")
            assert recent == 0, "each had a salt of its own"
            assert len(wanted) <= MAX_SALTS, "else outputs of the first salts are dropped"
            found.append(await answers(driver, salted(wanted, "few"), at_once=12, run_ahead=3))
            assert not worker.fatal
            drafts = worker.engine.metrics.drafts
            right.update({name: drafts.value(name, "accepted") for name in DRAFTERS})

    asyncio.run(on_a_worker())
    return found, right


def salted(wanted: list[Wanted], name: str) -> list[Wanted]:
    """The requests, each with its own salt."""
    return [replace(each, salt=f"{name} {number}") for number, each in enumerate(wanted)]


def draft_whenever_possible(worker: LocalWorker) -> None:
    costs = worker.loaded.backend.row_costs
    if costs is not None:
        ones = np.ones(len(costs.rows))
        passes = None if costs.passes is None else 0 * ones
        worker.loaded.backend.row_costs = RowCosts(costs.rows, ones, 0.0, passes)


@pytest.mark.parametrize(
    ("family", "dtype", "kv"), [("qwen3", "bfloat16", "auto"), ("llama", "float16", "fp8")]
)
def test_bits_are_those_without_drafts(tmp_path: Path, family: str, dtype: str, kv: str) -> None:
    save_model(tmp_path, family, **SIZES)
    settings = {"dtype": dtype, "kv_cache_dtype": kv, "batch_invariant": True}
    want, none = run(tmp_path, "none", **settings)
    got, right = run(tmp_path, "suffix", want[2], **settings)
    assert set(none.values()) == {0}
    assert right["suffix"] > 400
    assert right["recent"] > 100
    assert right["prediction"] > 100
    check_same(got, want)


@pytest.mark.parametrize("layers", [4, 2])
def test_bits_are_those_without_a_draft_model(tmp_path: Path, layers: int) -> None:
    """The model itself drafts, and another one that is almost never right."""
    save_model(tmp_path, "qwen3", **SIZES)
    save_model(tmp_path / "draft", "qwen3", **SIZES | {"num_hidden_layers": layers})
    settings = {"dtype": "bfloat16", "batch_invariant": True}
    want, _ = run(tmp_path, "none", **settings)
    draft = str(tmp_path / "draft")
    got, right = run(tmp_path, "draft", want[2], draft_model=draft, **settings)
    assert right["draft_model"] > (300 if layers == SIZES["num_hidden_layers"] else 0)
    assert right["prediction"] > 100
    check_same(got, want)


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_bits_are_those_without_an_eagle_head(tmp_path: Path, kv: str) -> None:
    """The head is random. It draws among few likely tokens with the target's noise."""
    save_model(tmp_path, "qwen3", **SIZES)
    shape = {name: SIZES[name] for name in ("num_attention_heads", "num_key_value_heads")}
    shape |= {"head_dim": 128, "intermediate_size": 3072, "torch_dtype": "bfloat16"}
    layers = {"eagle_aux_hidden_state_layer_ids": (0, 2, 3)}
    tokens = sorted({*LIKELY, *range(0, VOCABULARY, 2)})
    save_head(tmp_path / "head", tmp_path, len(tokens), tokens, **shape, **layers)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    tensors["lm_head.weight"] *= 0.1  # else its logits outweigh the biases
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    settings = {"dtype": "bfloat16", "kv_cache_dtype": kv, "batch_invariant": True}
    want, _ = run(tmp_path, "none", **settings)
    head = str(tmp_path / "head")
    got, right = run(tmp_path, "eagle", want[2], draft_model=head, **settings)
    assert right["draft_model"] > 100
    assert right["prediction"] > 100
    check_same(got, want)


def test_an_eagle_head_drafts_as_its_definition_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_model(tmp_path / "model", "llama")
    inputs = (0, 1, 2)
    head = save_head(
        tmp_path / "head", tmp_path / "model", 150, eagle_aux_hidden_state_layer_ids=inputs
    )
    four_drafts(monkeypatch)

    async def on_a_worker() -> None:
        settings = SETTINGS | {"max_model_len": 256, "num_slots": 8, "dtype": "float32"}
        given = {"speculate": "eagle", "draft_model": str(head)}
        async with local_worker(tmp_path / "model", **settings, **given) as worker:
            await check_drafts(worker, ReferenceHead(head, target, inputs), VOCAB)

    asyncio.run(on_a_worker())


def check_same(got: list[list[Answer]], want: list[list[Answer]]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        different = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        assert different == []


def test_without_the_mode_answers_are_whole(tmp_path: Path) -> None:
    """Tokens may depend on the rows of a step. Each has its log probability, and none is lost."""
    save_model(tmp_path, "qwen3", **SIZES)
    found, right = run(tmp_path, "suffix", dtype="bfloat16")
    assert right["suffix"] > 500
    for answers_ in found:
        for request, answer in zip(requests(), answers_, strict=False):
            assert len(answer.tokens) == len(answer.logprobs) == request.count
            assert min(answer.tokens) >= 0
