"""Constrained steps of the graph backend: the device waits for masks that the host computes."""

import asyncio

import pytest
import torch
from llguidance import LLMatcher

from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.constraints.grammars import grammars_of
from pagewire.worker.startup.triton_hooks import on_compilation
from support.models.constrained_sequences import (
    EOS,
    FOLDER,
    check_text,
    constrained,
    free,
    until_the_end,
)
from support.models.step_driver import StepDriver, local_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

VARIANTS = [{}, {"top_k": 30}, {"presence_penalty": 1.0}, {"logprobs": 2}]


def checked(output: list[int]) -> list[int]:
    """The tokens before the end; they are valid JSON of the schema."""
    tokens = until_the_end(output)
    grammars = grammars_of(FOLDER, 4096)
    assert grammars is not None
    check_text(grammars.tokenizer, tokens)
    return tokens


@pytest.mark.parametrize("run_ahead", [1, 2, 6])
def test_outputs_match_beside_free_rows(run_ahead: int) -> None:
    late: list[str] = []

    async def check() -> None:
        async with local_worker(FOLDER, device="cuda", num_slots=16) as worker:
            on_compilation(late.append)
            driver = StepDriver(worker.stream(), worker.limits)
            batch = [constrained(seed, **VARIANTS[seed % 4]) for seed in range(8)]
            outputs = await driver.run([free(0), *batch, free(1)], chunk=2, run_ahead=run_ahead)
            again = [constrained(seed, **VARIANTS[seed % 4]) for seed in range(8)]
            repeated = await driver.run([free(0), *again, free(1)], chunk=2, run_ahead=run_ahead)
            for output, other in zip(outputs[1:-1], repeated[1:-1], strict=True):
                assert checked(output) == checked(other)
            # Log probabilities are of the model's own logits: some likeliest token is not allowed.
            assert any(chosen < min(top) for chosen, _, top in batch[3].logprobs)
            assert not worker.fatal

    asyncio.run(check())
    assert not late


def test_a_bad_grammar_fails_alone() -> None:
    bad = constrained(1)
    bad.constraint = pb.Constraint(grammar=LLMatcher.grammar_from_regex("(?=a)"), end_token_ids=EOS)

    async def check() -> None:
        async with local_worker(FOLDER, device="cuda", num_slots=16) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            failed, good = await driver.run([bad, constrained(2)], run_ahead=3)
            assert "look-around" in bad.failure
            assert set(failed) == {-1}
            checked(good)
            assert not worker.fatal

    asyncio.run(check())
