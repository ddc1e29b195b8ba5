"""The vectors of a step, and the requests for them."""

import numpy as np
import pytest

from pagewire.errors import RequestError
from pagewire.packing import pack, pack_floats
from pagewire.scheduler.core.pooling import ModelPooling
from pagewire.scheduler.requests.prompt import ModelLimits
from pagewire.scheduler.stages.pooled import read_vectors
from pagewire.scheduler.stages.pooling_requests import check_task, parse_pooling_request
from pagewire.scheduler.text.text_pairs import pair_text
from pagewire.scheduler.text.tokenizer import Tokenizer
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb

EMBED, SCORE = pb.POOLING_TASK_EMBED, pb.POOLING_TASK_SCORE
EMBEDDINGS = ModelPooling("embed", 8, "normalize", False, "tokenizer")
SCORES = ModelPooling("score", 1, "sigmoid", False, "tokenizer")


def result(tokens: list[int], numbers: list[float]) -> worker_pb.StepResult:
    pooled = pack_floats(np.array(numbers, np.float32))
    return worker_pb.StepResult(step=4, token_ids=pack(tokens), pooled=pooled)


def test_rows_that_failed_have_no_vector() -> None:
    vectors = read_vectors(result([0, -1, 0], [1, 2, 3, 4]), 2)
    assert vectors.tolist() == [[1, 2], [0, 0], [3, 4]]
    assert read_vectors(result([], []), 2).shape == (0, 2)


@pytest.mark.parametrize("numbers", [[], [1, 2, 3], [1, 2, 3, 4, 5, 6]])
def test_too_few_and_too_many_numbers_are_invalid(numbers: list[float]) -> None:
    with pytest.raises(ValueError, match="for 2 vectors of 2"):
        read_vectors(result([0, -1, 0], numbers), 2)


def test_a_request_needs_a_model_of_its_task() -> None:
    generating = pb.GenerateRequest(prompt="a")
    embedding = pb.GenerateRequest(prompt="a", pooling=pb.PoolingParams(task=EMBED))
    scoring = pb.GenerateRequest(prompt="a", pooling=pb.PoolingParams(task=SCORE))
    fits = {None: generating, EMBEDDINGS: embedding, SCORES: scoring}
    for pooling in fits:
        for request in fits.values():
            if request is fits[pooling]:
                check_task(request, pooling, "m")
                continue
            with pytest.raises(RequestError, match="only; use /v1/") as raised:
                check_task(request, pooling, "m")
            assert raised.value.field == "model"


def test_a_prompt_may_fill_the_context(byte_level: Tokenizer) -> None:
    limits = ModelLimits(4, 100, 300, pooling=EMBEDDINGS)
    params = pb.PoolingParams(task=EMBED, dimensions=3)
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1] * 4), pooling=params)
    parsed = parse_pooling_request(request, byte_level, limits)
    assert parsed.tokens.prompt.tolist() == [1] * 4
    assert parsed.pooling == params
    assert (parsed.max_tokens, parsed.stop_ids, parsed.text) == (0, (), None)
    request.prompt_token_ids.ids.append(1)
    with pytest.raises(RequestError, match=r"requested 5 tokens \(5 in the prompt, 0 in"):
        parse_pooling_request(request, byte_level, limits)
    request.truncate_prompt_tokens = -1
    assert len(parse_pooling_request(request, byte_level, limits).tokens.prompt) == 4
    request.prompt_token_ids.ids.append(1)
    request.truncate_prompt_tokens = 5
    with pytest.raises(RequestError, match=r"requested 5 tokens \(5 in the prompt, 0 in"):
        parse_pooling_request(request, byte_level, limits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 2),
        ("detokenize", False),
        ("sampling", pb.SamplingParams(temperature=1)),
        ("resume_token_ids", [4]),
        ("beam_search", pb.BeamSearch(width=2)),
        ("structured_output", pb.StructuredOutput(regex="a")),
        ("prompt_text", True),
        ("chat", pb.ChatInput(messages=[pb.ChatMessage(role="user", content="a")])),
    ],
)
def test_fields_about_output_are_refused(byte_level: Tokenizer, field: str, value: object) -> None:
    limits = ModelLimits(100, 100, 300, pooling=EMBEDDINGS)
    request = pb.GenerateRequest(
        pooling=pb.PoolingParams(task=EMBED), **{"prompt": "a", field: value}
    )
    with pytest.raises(RequestError, match=f"{field} is about output") as raised:
        parse_pooling_request(request, byte_level, limits)
    assert raised.value.field == field


def test_a_pair_is_joined_by_the_tokenizer_or_by_the_format() -> None:
    pair = pb.TextPair(query="q", document="d")
    assert pair_text(pair, "tokenizer") == ("q", "d")
    text = pair_text(pair, "qwen3")
    assert isinstance(text, str)
    assert "<Query>: q\n<Document>: d<|im_end|>" in text
    pair.instruction = "find d"
    assert "<Instruct>: find d\n" in str(pair_text(pair, "qwen3"))
    with pytest.raises(RequestError, match="instruction is for rerankers"):
        pair_text(pair, "tokenizer")
