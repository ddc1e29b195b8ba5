"""Whole answers of a tiny model are the same bits, by the kernels in Triton's interpreter.

`tests/gpu/test_one_answer.py` does the same on a GPU, with graphs and larger sizes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.ops import load_ops
from pagewire.worker.protocol.backend import LoadedWorker
from pagewire.worker.runtime.eager import EagerBackend
from support.kernels.any_threads import one_accumulator
from support.kernels.comparison import CUDA
from support.models.host_graphs import with_host_graphs
from support.models.one_answer import Answer, Wanted, answers, preempted_answers
from support.models.step_driver import StepDriver, local_worker
from support.models.tiny_models import VOCAB, greedy_tokens, save_model

pytestmark = pytest.mark.skipif(CUDA, reason="tests/gpu/test_one_answer.py does so on a GPU")

COUNT = 3


def by_these_kernels(loaded: LoadedWorker) -> LoadedWorker:
    """The worker with the operations of this mode, in the interpreter."""
    eager = loaded.backend
    assert isinstance(eager, EagerBackend)
    old = eager._decoder
    decoder = Decoder(old.config, old.weights, load_ops("invariant"), old.tables)
    dtype = old.weights.embedding.dtype
    object.__setattr__(loaded, "backend", EagerBackend(decoder, loaded.limits, dtype))
    return loaded


@pytest.mark.parametrize(
    ("variant", "kv"), [("qwen3", "auto"), ("qwen2", "auto"), ("qwen3", "fp8")]
)
def test_answers_do_not_depend_on_the_batch_or_the_chunks(
    tmp_path: Path, variant: str, kv: str
) -> None:
    model = save_model(tmp_path, variant, num_hidden_layers=2)
    generator = random.Random(3)

    def draw(length: int, **sampling: float) -> Wanted:
        prompt = [generator.randrange(VOCAB) for _ in range(length)]
        return Wanted(prompt, COUNT, pb.SlotSampling(top_p=1.0, logprobs=2, **sampling))

    wanted = [draw(5), draw(66, temperature=0.8, seed=5), draw(19, frequency_penalty=0.5)]
    others = [draw(3, temperature=1.5, top_k=20), draw(40)]

    async def check() -> None:
        settings = {"max_model_len": 96, "kv_cache_dtype": kv}
        async with local_worker(tmp_path, by_these_kernels, **settings) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            alone = await answers(driver, wanted, at_once=1)
            if kv == "auto":
                assert alone[0].tokens == greedy_tokens(model, wanted[0].prompt, COUNT)
            assert await answers(driver, wanted, others=others) == alone
            assert await answers(driver, wanted, chunk=13) == alone
            assert await preempted_answers(driver, wanted, 1) == alone
            assert not worker.fatal

    with one_accumulator():
        asyncio.run(check())


def test_answers_of_graphs_of_other_sizes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and tokens that pad a captured step change nothing."""
    save_model(tmp_path, "qwen3", num_hidden_layers=2)
    generator = random.Random(5)
    wanted = [
        Wanted([generator.randrange(VOCAB) for _ in range(length)], COUNT) for length in (9, 34, 3)
    ]
    settings = {"max_model_len": 48, "num_slots": 4, "worker_max_num_batched_tokens": 40}

    async def found(adapt: Callable[[LoadedWorker], LoadedWorker], at_once: int) -> list[Answer]:
        async with local_worker(tmp_path, adapt, **settings) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            result = await answers(driver, wanted, at_once=at_once)
            assert not worker.fatal
        return result

    as_graphs = with_host_graphs(monkeypatch)
    with one_accumulator():
        alone = asyncio.run(found(by_these_kernels, 1))
        assert asyncio.run(found(lambda loaded: as_graphs(by_these_kernels(loaded)), 3)) == alone
