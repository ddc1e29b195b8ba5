"""The last steps from a worker's vector to a result."""

import numpy as np
import pytest

from pagewire.scheduler.core.pooling import ModelPooling

VECTOR = np.array([3, 4, 12], np.float32)


def pooling(activation: str, task: str = "embed") -> ModelPooling:
    return ModelPooling(task, 3, activation, False, "tokenizer")


def test_an_embedding_is_cut_and_then_normalized() -> None:
    normalized = pooling("normalize")
    np.testing.assert_allclose(normalized.result(VECTOR, None), VECTOR / 13, rtol=1e-6)
    np.testing.assert_allclose(normalized.result(VECTOR, 2), [0.6, 0.8], rtol=1e-6)
    assert normalized.result(VECTOR, 2).dtype == np.float32
    assert pooling("none").result(VECTOR, 2).tolist() == [3, 4]


def test_a_vector_of_zeros_stays_one() -> None:
    assert pooling("normalize").result(np.zeros(3, np.float32), None).tolist() == [0, 0, 0]


def test_the_sigmoid_does_not_overflow() -> None:
    logits = np.array([-200, -1, 0, 1, 200], np.float32)
    scores = pooling("sigmoid", "score").result(logits, None)
    expected = [0, 1 / (1 + np.e), 0.5, np.e / (1 + np.e), 1]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    assert scores.dtype == np.float32


def test_it_travels_to_helper_processes() -> None:
    sent = ModelPooling("score", 1, "sigmoid", True, "qwen3")
    assert ModelPooling.from_bytes(sent.to_bytes()) == sent


@pytest.mark.parametrize(
    ("field", "value"),
    [("task", "sing"), ("activation", "relu"), ("pair_format", ""), ("size", 0)],
)
def test_what_is_not_known_is_refused(field: str, value: object) -> None:
    fields = {
        "task": "embed",
        "size": 4,
        "activation": "none",
        "whole_prompt": False,
        "pair_format": "tokenizer",
    }
    with pytest.raises(ValueError, match=field):
        ModelPooling(**fields | {field: value})
