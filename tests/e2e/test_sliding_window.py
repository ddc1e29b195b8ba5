"""A model whose layers all have a window, with a pool too small for the KV of one sequence.

Answers equal those of transformers, which keeps all KV, and of a stack with memory for all KV.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from transformers import PreTrainedModel

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.models.tiny_models import VOCAB, beam_outputs, greedy_tokens, save_model
from support.processes.stack_process import RunningStack, is_idle, running_stack
from support.waiting import until

WINDOW = 32
# Twelve blocks of 16 tokens without scratch: 192 tokens.
TIGHT = 13
SHARED = [(11 * i) % VOCAB for i in range(120)]
# The third and fourth begin alike.
PROMPTS = [
    [5],
    [(7 * i) % VOCAB for i in range(40)],
    [*SHARED, *[(3 * i) % VOCAB for i in range(30)]],
    [*SHARED, *[(5 * i) % VOCAB for i in range(110)]],
    [(13 * i) % VOCAB for i in range(260)],
]
LENGTH = 300

Stub = inference_pb2_grpc.InferenceStub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("window")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return save_model(folder, "mistral-window", sliding_window=WINDOW, initializer_range=0.08)


@contextmanager
def stack_of(folder: Path, num_blocks: int) -> Iterator[RunningStack]:
    # Small steps: the chunks of a prefill need blocks beside its window.
    flags = (f"--num-blocks={num_blocks}", "--worker-max-num-batched-tokens=32", "--num-slots=8")
    with running_stack("--skip-tokenizer", "--check-invariants", *flags, model=folder) as started:
        yield started


@pytest.fixture(scope="module")
def stack(folder: Path, model: PreTrainedModel) -> Iterator[RunningStack]:
    """Replaces the folder's stack in this module."""
    with stack_of(folder, TIGHT) as started:
        yield started


def request(prompt: list[int], seed: int | None = None) -> pb.GenerateRequest:
    """A request for tokens up to LENGTH, greedy without a seed."""
    sampling = pb.SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed)
    return pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=prompt),
        stop=pb.StopConditions(max_tokens=LENGTH - len(prompt)),
        detokenize=False,
        sampling=sampling,
    )


def run_all(stub: Stub, requests: list[pb.GenerateRequest]) -> list[list[int]]:
    """The tokens of requests that run at once."""
    streams = [stub.Generate(each, timeout=100) for each in requests]
    return [[token for response in stream for token in response.token_ids] for stream in streams]


def test_sequences_longer_than_the_pool_get_the_tokens_of_transformers(
    stub: Stub, model: PreTrainedModel
) -> None:
    load = stub.GetLoad(pb.GetLoadRequest())
    assert load.total_blocks * 16 < LENGTH
    (served,) = stub.ListModels(pb.ListModelsRequest()).models
    assert served.max_model_len == model.config.max_position_embeddings, "not what the pool holds"
    outputs = run_all(stub, [request(prompt) for prompt in PROMPTS])
    assert outputs == [greedy_tokens(model, p, LENGTH - len(p)) for p in PROMPTS]
    until(lambda: is_idle(stub), 10)


def test_a_conversation_goes_on_from_the_window_at_its_end(
    stub: Stub, model: PreTrainedModel
) -> None:
    first = request(PROMPTS[4])
    first.stop.max_tokens = 25
    (output,) = run_all(stub, [first])
    history = [*PROMPTS[4], *output]
    more = request([*history, 3, 1, 4])
    more.stop.max_tokens = 12
    *_, last = stub.Generate(more, timeout=100)
    # All full blocks except the one with the last output token, which has no KV.
    assert last.finish.usage.cached_tokens == (len(history) - 1) // 16 * 16
    (again,) = run_all(stub, [more])
    assert again == greedy_tokens(model, [*history, 3, 1, 4], 12)


def test_a_killed_worker_and_many_samples_change_no_token(
    folder: Path, stack: RunningStack, stub: Stub
) -> None:
    requests = [request(PROMPTS[n % len(PROMPTS)], seed=n // 3) for n in range(20)]
    with stack_of(folder, 600) as ample, grpc.insecure_channel(ample.grpc_address) as channel:
        want = run_all(Stub(channel), requests)
        assert Stub(channel).GetLoad(pb.GetLoadRequest()).preemptions == 0
    assert len({tuple(tokens) for tokens in want}) > len(PROMPTS)
    streams = [stub.Generate(each, timeout=100) for each in requests]
    received = [[next(streams[0])], *([] for _ in streams[1:])]
    stack.kill_worker()
    for responses, stream in zip(received, streams, strict=True):
        responses += stream
    got = [[t for response in responses for t in response.token_ids] for responses in received]
    assert got == want
    until(lambda: is_idle(stub), 20)


def test_beams_equal_those_of_transformers(stub: Stub, model: PreTrainedModel) -> None:
    prompt, width = PROMPTS[3][:150], 3
    message = request(prompt)
    message.ClearField("sampling")
    message.stop.max_tokens = 24
    message.beam_search.width = width
    (response,) = stub.Generate(message, timeout=60)
    expected = beam_outputs(model, prompt, 24, (), num_beams=width)
    assert [list(h.token_ids) for h in response.finish.hypotheses] == [t for t, _ in expected]
    until(lambda: is_idle(stub), 10)
