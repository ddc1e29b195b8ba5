"""Constrained sequences in whole steps: on each kind of backend, sent ahead, resumed."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.backend import Outcome
from pagewire.worker.protocol.constraints.grammars import grammars_of
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.runtime.eager import EagerBackend
from pagewire.worker.startup.loading import LoadedWorker
from support.models.constrained_sequences import (
    EOS,
    FOLDER,
    check_text,
    constrained,
    free,
    until_the_end,
)
from support.models.host_graphs import with_host_graphs
from support.models.step_driver import StepDriver, local_worker

SMALL = {"max_model_len": 256, "worker_max_num_batched_tokens": 32}

GRAMMARS = grammars_of(FOLDER, 4096)
assert GRAMMARS is not None
TOKENIZER = GRAMMARS.tokenizer

Adapt = Callable[[LoadedWorker], LoadedWorker]


class DeferredBackend(EagerBackend):
    """Behaves as on a GPU: tokens are available some time after `submit` has returned."""

    synchronous = False

    def __init__(self, inner: EagerBackend) -> None:
        self.inner = inner
        self.mask_memory = inner.mask_memory

    def submit(self, plan: DevicePlan) -> Any:
        return self.inner.submit(plan)

    def wait(self, handle: Any) -> Outcome:
        time.sleep(0.003)
        return self.inner.wait(handle)

    def scrub(self, blocks: Any) -> None:
        self.inner.scrub(blocks)


def deferred(loaded: LoadedWorker) -> LoadedWorker:
    assert isinstance(loaded.backend, EagerBackend)
    return replace(loaded, backend=DeferredBackend(loaded.backend))


@pytest.fixture(params=["eager", "deferred", "graphs"])
def adapt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Adapt:
    if request.param == "eager":
        return lambda loaded: loaded
    return deferred if request.param == "deferred" else with_host_graphs(monkeypatch)


async def test_outputs_match_and_depend_on_nothing_else(adapt: Adapt) -> None:
    """Beside free rows, with steps sent ahead, with log probabilities and penalties, resumed."""
    variants = [{}, {"top_k": 30}, {"presence_penalty": 1.0}, {"logprobs": 2}]
    async with local_worker(FOLDER, adapt, **SMALL) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        batch = [constrained(seed, **fields) for seed, fields in enumerate(variants)]
        mixed = await driver.run([free(0), *batch, free(1)], chunk=2, run_ahead=4)
        for seed, fields in enumerate(variants):
            (alone,) = await driver.run([constrained(seed, **fields)])
            tokens = until_the_end(alone)
            assert until_the_end(mixed[1 + seed]) == tokens
            check_text(TOKENIZER, tokens)
            if fields:
                continue
            half = tokens[: len(tokens) // 2]
            (resumed,) = await driver.run([constrained(seed, half)])
            assert half + until_the_end(resumed) == tokens
        untouched = await driver.run([free(0), free(1)], run_ahead=2)
        assert [mixed[0], mixed[-1]] == untouched
        # Log probabilities are of the model's own logits: some likeliest token is not allowed.
        assert any(chosen < min(top) for chosen, _, top in batch[3].logprobs)
        assert not worker.fatal


async def test_a_bad_grammar_fails_alone(adapt: Adapt) -> None:
    bad = constrained(1)
    bad.constraint = pb.Constraint(grammar=LLMatcher.grammar_from_regex("(?=a)"), end_token_ids=EOS)
    async with local_worker(FOLDER, adapt, **SMALL) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        failed, good = await driver.run([bad, constrained(2)], run_ahead=3)
        (alone,) = await driver.run([constrained(2)])
    assert "look-around" in bad.failure
    assert set(failed) == {-1}
    assert until_the_end(good) == until_the_end(alone)


async def test_a_failed_step_does_not_block_those_sent_ahead() -> None:
    class FailsOnce(DeferredBackend):
        steps = 0

        def wait(self, handle: Any) -> Outcome:
            outcome = super().wait(handle)
            self.steps += 1
            if self.steps == 3:
                raise RuntimeError("a fault of the device")
            return outcome

        def is_fatal(self, error: BaseException) -> bool:
            return False

    def failing(loaded: LoadedWorker) -> LoadedWorker:
        assert isinstance(loaded.backend, EagerBackend)
        return replace(loaded, backend=FailsOnce(loaded.backend))

    async with local_worker(FOLDER, failing, **SMALL) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        sequence = constrained(0)
        began = time.monotonic()
        await driver.run([sequence], run_ahead=4)
    assert "a fault of the device" in sequence.failure
    assert time.monotonic() - began < 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="the real graphs are tested there")
async def test_host_graphs_equal_the_eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for adapt in (lambda loaded: loaded, with_host_graphs(monkeypatch)):
        async with local_worker(FOLDER, adapt, **SMALL) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            batch = [constrained(0), free(3), constrained(1, repetition_penalty=1.2)]
            first, other, last = await driver.run(batch, chunk=1)
            outputs.append((until_the_end(first), other, until_the_end(last)))
    assert outputs[0] == outputs[1]
