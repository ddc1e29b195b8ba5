"""Drafts change only the number of steps of an answer."""

import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from pagewire.config import WorkerConfig
from pagewire.models import resolve_model
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.errors import SetupError
from pagewire.worker.startup.loading import check_speculation
from support.drafted_sequences import (
    accepted,
    check_failed_step,
    check_resumption,
    check_same,
    compute_rows_by_themselves,
    repetitive,
    sequences,
)
from support.models.constrained_sequences import EOS
from support.models.step_driver import LocalWorker, Sequence, StepDriver, local_worker
from support.models.tiny_models import VARIANTS, VOCAB, save_model

FOLDER = resolve_model("embedded")
LENGTH = 80


async def run(speculate: str, **cut: int) -> tuple[list[Sequence], int]:
    """The sequences with their results, and the number of right drafts."""
    async with local_worker(FOLDER, speculate=speculate, num_blocks=512) as worker:
        ran = sequences(LENGTH)
        await StepDriver(worker.stream(), worker.limits).run(ran, **cut)
        assert worker.fatal == []
        return ran, accepted(worker)


@pytest.mark.parametrize("cut", [{}, {"run_ahead": 2}, {"run_ahead": 3, "chunk": 16}])
async def test_tokens_are_those_of_steps_without_drafts(cut: dict[str, int]) -> None:
    want, _ = await run("none", **cut)
    got, right = await run("suffix", **cut)
    assert right > 50
    check_same(got, want)


async def test_log_probabilities_have_the_same_bits_where_rows_do_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute_rows_by_themselves(monkeypatch)
    want, _ = await run("none", run_ahead=2)
    got, right = await run("suffix", run_ahead=2)
    assert right > 50
    assert [s.output for s in got] == [s.output for s in want]
    assert [s.logprobs for s in got] == [s.logprobs for s in want]


async def test_a_resumed_sequence_goes_on_as_it_would_have() -> None:
    async with local_worker(FOLDER, speculate="suffix", num_blocks=256) as worker:
        await check_resumption(worker, LENGTH, (1, 20, 50), run_ahead=2)
        assert accepted(worker) > 50


async def test_drafts_fit_into_the_tokens_of_a_step() -> None:
    limit = {"worker_max_num_batched_tokens": 8}
    async with local_worker(FOLDER, speculate="suffix", num_blocks=256, **limit) as worker:
        submit = worker.loaded.backend.submit

        def checked(plan: Any) -> Any:
            assert plan.num_decodes + plan.num_prefilled <= 8
            return submit(plan)

        worker.loaded.backend.submit = checked  # type: ignore[method-assign]
        many = [Sequence(repetitive(i), 40) for i in range(6)]
        outputs = await StepDriver(worker.stream(), worker.limits).run(many, run_ahead=2)
        assert [len(output) for output in outputs] == [40] * 6
        assert accepted(worker) > 5


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "window" in v or "gemma" in v][:4])
async def test_other_kinds_of_attention(tmp_path: Path, variant: str) -> None:
    save_model(tmp_path, variant)
    outputs = []
    for speculate in ("none", "suffix"):
        async with local_worker(tmp_path, speculate=speculate) as worker:
            ran = [Sequence([(i * 7 + j % 5) % VOCAB for j in range(40)], 60) for i in range(4)]
            driver = StepDriver(worker.stream(), worker.limits)
            outputs.append(await driver.run(ran, run_ahead=2))
    assert outputs[0] == outputs[1]


async def test_a_failed_step_with_drafts_fails_its_sequences_alone() -> None:
    async with local_worker(FOLDER, speculate="suffix", num_blocks=256) as worker:
        await check_failed_step(worker, 60)


PASSAGE = (
    "Tara is in the kitchen. Adam has a red kite. Hana likes plums. Peter went to the garden. "
    "Priya is a baker. Tom has seven apples. The garden is behind the old house. Nina sings well."
)


def quoting(temperature: float) -> Sequence:
    """The passage of the prompt, by a grammar."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = f"<|im_start|>user\nRepeat after me: {PASSAGE}<|im_end|>\n<|im_start|>assistant\n"
    grammar = LLMatcher.grammar_from_regex(re.escape(PASSAGE))
    return Sequence(
        tokenizer.encode(text).ids,
        len(tokenizer.encode(PASSAGE).ids),
        sampling=pb.SlotSampling(top_p=1, temperature=temperature),
        constraint=pb.Constraint(grammar=grammar, end_token_ids=EOS),
    )


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_quote_from_the_prompt_is_at_least_one_and_a_half_times_as_fast(
    temperature: float,
) -> None:
    async with (
        local_worker(FOLDER, speculate="none") as plain,
        local_worker(FOLDER, speculate="suffix") as fast,
    ):
        times: list[tuple[float, float]] = []
        for _ in range(7):
            want, plain_time = await _timed(plain, quoting(temperature))
            got, fast_time = await _timed(fast, quoting(temperature))
            assert got == want
            times.append((plain_time, fast_time))
    plain_time, fast_time = map(statistics.median, zip(*times, strict=True))
    print(f"{plain_time / fast_time:.2f} times as fast")
    assert plain_time / fast_time >= 1.5


async def _timed(worker: LocalWorker, sequence: Sequence) -> tuple[list[int], float]:
    driver = StepDriver(worker.stream(), worker.limits)
    began = time.perf_counter()
    (output,) = await driver.run([sequence], run_ahead=2)
    return output, time.perf_counter() - began


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"task": "embed"}, "generates nothing"),
        ({"block_size": 1}, "blocks of 2 tokens"),
    ],
)
async def test_a_worker_that_cannot_speculate_says_so(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(SetupError, match=part):
        async with local_worker(FOLDER, speculate="suffix", **settings):
            pass


def test_a_gpu_without_the_kernels_is_refused_by_name() -> None:
    config = WorkerConfig(model=str(FOLDER), speculate="suffix")
    device = torch.device("cuda", 0)
    check_speculation(config, device, "triton", pools=False)
    with pytest.raises(SetupError, match=r"--speculate suffix on cuda:0.* leave --ops torch out"):
        check_speculation(config, device, "torch", pools=False)


def test_an_external_program_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "pagewire.cli.main", "worker", "--backend=command"]
    command += ["--command=cat", "--speculate=suffix", f"--model={FOLDER}"]
    command += ["--worker-address=127.0.0.1:0", "--worker-metrics-port=0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "--speculate suffix has no use with --backend command" in ended.stdout + ended.stderr
