"""Outputs that a benchmark forces: they occur with any weights, in every kind of step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.models import resolve_model
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.errors import SetupError
from support.models.step_driver import Sequence, StepDriver, local_worker

FOLDER = resolve_model("embedded")
PROMPTS = [[40 + i, *range(50, 90 + i)] for i in range(4)]
# The first repeats its prompt, so that drafts are right.
TEXTS = [PROMPTS[0][1:] * 2, [*range(900, 960)], [7] * 33, [*range(300, 400)]]


def written(folder: Path, **changes: Any) -> str:
    lines = [
        {"prompt_token_ids": prompt, "token_ids": text} | changes
        for prompt, text in zip(PROMPTS, TEXTS, strict=True)
    ]
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


@pytest.mark.parametrize("speculate", ["none", "suffix"])
@pytest.mark.parametrize("cut", [{}, {"run_ahead": 3, "chunk": 16}])
async def test_the_text_comes_whatever_the_weights(
    tmp_path: Path, speculate: str, cut: dict[str, int]
) -> None:
    ways = [
        pb.SlotSampling(top_p=1),
        pb.SlotSampling(top_p=0.9, temperature=1, seed=5, frequency_penalty=0.5),
        pb.SlotSampling(top_p=1, min_tokens=40, stop_token_ids=[7]),
        pb.SlotSampling(top_p=1, logprobs=2),
    ]
    settings: dict[str, Any] = {"load_format": "dummy", "forced_texts": written(tmp_path)}
    async with local_worker(FOLDER, speculate=speculate, **settings) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        ran = [
            Sequence(prompt, len(text), sampling=way)
            for prompt, text, way in zip(PROMPTS, TEXTS, ways, strict=True)
        ]
        assert await driver.run(ran, **cut) == TEXTS
        # Log probabilities are those of the forced tokens, which random weights find unlikely.
        assert len(ran[3].logprobs) == len(TEXTS[3])
        assert all(chosen < top[0] for chosen, _, top in ran[3].logprobs[:20])
        # A continuation continues the text, and slots are reused.
        for known in (1, 20):
            rest = Sequence(PROMPTS[1] + TEXTS[1][:known], 60 - known, generated=known)
            other = Sequence(PROMPTS[2], 33)
            assert await driver.run([rest, other], **cut) == [TEXTS[1][known:], TEXTS[2]]
        if speculate == "suffix":
            assert driver.accepted[pb.DRAFTER_SUFFIX] > 60


async def test_behind_the_end_of_a_text_tokens_are_drawn(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"load_format": "dummy", "forced_texts": written(tmp_path)}
    async with local_worker(FOLDER, **settings) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        (output,) = await driver.run([Sequence(PROMPTS[2], 50)])
        assert output[:33] == TEXTS[2]
        assert output[33:] != [7] * 17


async def test_any_other_prompt_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"load_format": "dummy", "forced_texts": written(tmp_path)}
    async with local_worker(FOLDER, **settings) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        ran = [Sequence([*PROMPTS[0], 1], 5), Sequence(PROMPTS[0][:-1], 5), Sequence(PROMPTS[3], 5)]
        outputs = await driver.run(ran)
        for sequence in ran[:2]:
            assert "has none for this prompt" in sequence.failure
        assert outputs[2] == TEXTS[3][:5]


async def test_without_the_setting_nothing_is_forced() -> None:
    async with local_worker(FOLDER) as worker:
        slots = worker.loaded.backend._slots  # type: ignore[attr-defined]
        assert slots.forced_tokens is None
        drawn = torch.tensor([3], dtype=torch.int32)
        assert slots.forced(drawn, drawn, drawn) is drawn


def test_no_message_can_force() -> None:
    """The protocols have no field for it: what a worker gets is what it computes."""
    names = {field.name for field in pb.SequenceStart.DESCRIPTOR.fields}
    assert not any("forced" in name for name in names)
    assert {"prediction", "cache_salt"} < names


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({}, "needs --load-format dummy"),
        ({"load_format": "dummy", "token_ids": [5000]}, r"line 1: .*outside the 4096 ids"),
        ({"load_format": "dummy", "token_ids": []}, r"texts\.jsonl, line 1: .*no tokens"),
        ({"load_format": "dummy", "token_ids": "x"}, r"texts\.jsonl, line 1: "),
        ({"load_format": "dummy", "forced_texts": "/no/such/file"}, "No such file"),
    ],
)
async def test_a_worker_that_cannot_force_says_so(
    tmp_path: Path, settings: dict[str, Any], part: str
) -> None:
    changes = {name: settings.pop(name) for name in ("token_ids",) if name in settings}
    given = {"forced_texts": written(tmp_path, **changes)} | settings
    with pytest.raises(SetupError, match=part):
        async with local_worker(FOLDER, **given):
            pass
