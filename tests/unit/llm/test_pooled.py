"""From a caller's texts to jobs that embed or score."""

import pytest

from pagewire.llm import RequestError
from pagewire.llm.pooled import embedding_jobs, score_jobs
from pagewire.llm.prompts import list_prompts
from pagewire.v1 import inference_pb2 as pb

MODEL = pb.Model(id="m", max_model_len=64, task=pb.POOLING_TASK_SCORE)


def test_one_text_or_several():
    assert len(score_jobs("a", "b", {}, MODEL)) == 1
    for documents in (["b", "c"], ("b", "c"), (text for text in ("b", "c"))):
        assert len(score_jobs("a", documents, {}, MODEL)) == 2


@pytest.mark.parametrize(
    ("text_1", "text_2", "reason"),
    [
        (None, "b", "text_1 is of type NoneType; give a text or a list of texts"),
        ("a", 5, "text_2 is of type int"),
        ({"a": 1}, "b", "text_1 is of type dict"),
        ("a", b"b", "text_2 is of type bytes"),
        ("a", ["b", "\ud800"], "prompt 1: a text has .* half of a pair of surrogates"),
    ],
)
def test_texts_that_are_refused(text_1, text_2, reason):
    with pytest.raises(RequestError, match=reason):
        score_jobs(text_1, text_2, {}, MODEL)


def test_inputs_that_are_refused():
    with pytest.raises(RequestError, match="inputs is of type NoneType"):
        list_prompts(None, "inputs")
    with pytest.raises(RequestError, match="half of a pair of surrogates"):
        embedding_jobs(["\ud800"], {}, MODEL)
