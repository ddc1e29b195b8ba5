"""Beam search through the whole stack with a tiny model: the beams and scores of transformers."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from transformers import PreTrainedModel

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.models.tiny_models import beam_outputs, greedy_tokens, save_model
from support.processes.stack_process import RunningStack, is_idle, running_stack
from support.waiting import until

PROMPT = [(7 * i) % 190 for i in range(37)]
COUNT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beam")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return save_model(folder, "llama", initializer_range=0.08)


@pytest.fixture(scope="module")
def stack(folder: Path, model: PreTrainedModel) -> Iterator[RunningStack]:
    """Replaces the folder's stack in this module."""
    with running_stack("--skip-tokenizer", "--check-invariants", model=folder) as started:
        yield started


def request(width: int, stop_ids: tuple[int, ...] = (), **search: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=PROMPT),
        stop=pb.StopConditions(max_tokens=COUNT, stop_token_ids=stop_ids),
        detokenize=False,
        beam_search=pb.BeamSearch(width=width, **search),
    )


def run(stub: inference_pb2_grpc.InferenceStub, message: pb.GenerateRequest) -> pb.Finish:
    (response,) = stub.Generate(message, timeout=60)
    assert not response.token_ids
    return response.finish


def assert_same(finish: pb.Finish, expected: list[tuple[list[int], float]]) -> None:
    assert [list(h.token_ids) for h in finish.hypotheses] == [tokens for tokens, _ in expected]
    scores = [score for _, score in expected]
    assert [h.score for h in finish.hypotheses] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize(("width", "length_penalty"), [(2, 0.0), (4, 2.0), (16, 1.0)])
def test_beams_equal_those_of_transformers(
    stub: inference_pb2_grpc.InferenceStub,
    model: PreTrainedModel,
    width: int,
    length_penalty: float,
    early_stopping: bool,
) -> None:
    plain = beam_outputs(model, PROMPT, COUNT, (), num_beams=4)
    stop_ids = tuple(dict.fromkeys(token for tokens, _ in plain for token in tokens[9:]))[:2]
    finish = run(
        stub,
        request(width, stop_ids, length_penalty=length_penalty, early_stopping=early_stopping),
    )
    expected = beam_outputs(
        model,
        PROMPT,
        COUNT,
        stop_ids,
        num_beams=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    assert_same(finish, expected)
    for hypothesis in finish.hypotheses:
        stopped = hypothesis.token_ids[-1] in stop_ids
        assert hypothesis.HasField("stop_token_id") == stopped
        assert (hypothesis.reason == pb.FINISH_REASON_STOP) == stopped
    assert finish.usage.prompt_tokens == len(PROMPT)
    assert finish.usage.completion_tokens == sum(len(h.token_ids) for h in finish.hypotheses)
    until(lambda: is_idle(stub), 10)


def test_one_beam_gives_the_greedy_tokens(
    stub: inference_pb2_grpc.InferenceStub, model: PreTrainedModel
) -> None:
    finish = run(stub, request(1))
    assert [list(h.token_ids) for h in finish.hypotheses] == [greedy_tokens(model, PROMPT, COUNT)]


def test_searches_run_beside_each_other_and_beside_plain_requests(
    stub: inference_pb2_grpc.InferenceStub, model: PreTrainedModel
) -> None:
    """There are more sequences than slots, and one step runs rounds of several searches."""
    expected = beam_outputs(model, PROMPT, COUNT, (), num_beams=8)
    plain = request(1)
    plain.ClearField("beam_search")
    plain.sampling.temperature = 0
    searches = [stub.Generate(request(8, num_returned=5), timeout=100) for _ in range(6)]
    others = [stub.Generate(plain, timeout=100) for _ in range(4)]
    for search in searches:
        (response,) = search
        assert_same(response.finish, expected[:5])
    for other in others:
        tokens = [token for response in other for token in response.token_ids]
        assert tokens == greedy_tokens(model, PROMPT, COUNT)
    until(lambda: is_idle(stub), 10)


def test_a_cancelled_search_frees_its_blocks(stub: inference_pb2_grpc.InferenceStub) -> None:
    message = request(16)
    message.stop.max_tokens = 400
    call = stub.Generate(message)
    until(lambda: stub.GetLoad(pb.GetLoadRequest()).running > 0, 10)
    call.cancel()
    until(lambda: is_idle(stub), 10)


@pytest.mark.parametrize("flags", [("--num-blocks", "12"), ("--no-prefix-caching",)])
def test_a_small_pool_or_no_prefix_cache_gives_the_same_beams(
    folder: Path, model: PreTrainedModel, flags: tuple[str, ...]
) -> None:
    """16 beams need 16 last blocks, and one of the pools has 12 blocks."""
    with (
        running_stack("--skip-tokenizer", "--check-invariants", *flags, model=folder) as stack,
        grpc.insecure_channel(stack.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert_same(run(stub, request(16)), beam_outputs(model, PROMPT, COUNT, (), num_beams=16))
        until(lambda: is_idle(stub), 10)


def test_a_killed_worker_loses_no_beam(
    stack: RunningStack, stub: inference_pb2_grpc.InferenceStub, model: PreTrainedModel
) -> None:
    message = request(6)
    message.stop.max_tokens = 150
    call = stub.Generate(message, timeout=100)
    until(lambda: stub.GetLoad(pb.GetLoadRequest()).used_blocks > 6, 20)
    stack.kill_worker()
    (response,) = call
    assert_same(response.finish, beam_outputs(model, PROMPT, 150, (), num_beams=6))
    assert any("is lost" in line for line in stack.log)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"beam_search": pb.BeamSearch(width=17)}, "width"),
        ({"beam_search": pb.BeamSearch(width=0)}, "width"),
        ({"beam_search": pb.BeamSearch(width=2, num_returned=3)}, "num_returned"),
        ({"beam_search": pb.BeamSearch(width=2, length_penalty=11)}, "length_penalty"),
        ({"beam_search": pb.BeamSearch(width=2, length_penalty=float("nan"))}, "length_penalty"),
        ({"stop": pb.StopConditions(stop_token_ids=range(8))}, "stop tokens"),
        ({"sampling": pb.SamplingParams(temperature=0.7)}, "temperature"),
        ({"sampling": pb.SamplingParams(repetition_penalty=1.1)}, "repetition_penalty"),
        ({"sampling": pb.SamplingParams(logit_bias={1: 2})}, "logit_bias"),
        ({"sampling": pb.SamplingParams(top_p=0.7)}, "top_p"),
        ({"logprobs": 1}, "logprobs"),
        ({"resume_token_ids": [4]}, "resume_token_ids"),
    ],
)
def test_refused_parameters(
    stub: inference_pb2_grpc.InferenceStub, change: dict[str, object], field: str
) -> None:
    message = request(16)
    for name in change:
        message.ClearField(name)
    message.MergeFrom(pb.GenerateRequest(**change))
    with pytest.raises(grpc.RpcError) as refusal:
        run(stub, message)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in refusal.value.details()
