"""Sampling parameters of the Python API."""

import copy
import inspect
import pickle
from dataclasses import fields
from pathlib import Path

import pytest

from pagewire import sampling
from pagewire.gateway.api.completions import CompletionRequest
from pagewire.llm import RequestError, SamplingParams
from pagewire.llm.params import NAMES


def test_every_declared_parameter_is_there():
    declared = {
        f.name for f in (*fields(sampling.SamplingParams), *fields(sampling.StopConditions))
    }
    assert declared <= set(NAMES)
    assert set(NAMES) <= CompletionRequest.model_fields.keys()
    assert list(inspect.signature(SamplingParams).parameters) == list(NAMES)


def test_what_is_not_given_is_none():
    params = SamplingParams(temperature=0.5, stop=("a", "b"))
    assert (params.temperature, params.stop, params.top_p) == (0.5, ("a", "b"), None)
    assert params.given == {"temperature": 0.5, "stop": ("a", "b")}
    with pytest.raises(AttributeError, match="no 'temprature'"):
        _ = params.temprature


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"stream": True}, "stream", "not a sampling parameter"),
        ({"temperature": 3.0}, "temperature", "between 0 and 2"),
        ({"temperature": "hot"}, "temperature", "'hot'"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "above max_tokens"),
        ({"stop": [""]}, "stop", "empty"),
        ({"n": 17}, "n", "between 1 and 16"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logit_bias": {"cat": 1}}, "logit_bias", "token ids"),
        ({"early_stopping": True}, "early_stopping", "use_beam_search"),
    ],
)
def test_a_parameter_that_is_not_valid_is_named(given, field, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**given)
    assert caught.value.field == field


def test_python_values_become_those_of_json():
    params = SamplingParams(stop=("x",), logit_bias={7: -1.5}, stop_token_ids=(1, 2))
    assert params.fields() == {
        "stop": ["x"],
        "logit_bias": {"7": -1.5},
        "stop_token_ids": [1, 2],
    }


def test_parameters_can_be_changed_compared_and_copied():
    params = SamplingParams(temperature=0, seed=3)
    assert params.replace(seed=None, top_k=4) == SamplingParams(temperature=0, top_k=4)
    assert params != params.replace(seed=4)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert repr(params) == "SamplingParams(seed=3, temperature=0)"
    assert len({params, SamplingParams(temperature=0, seed=3)}) == 1


def test_the_page_names_every_parameter():
    page = (Path(__file__).parents[3] / "docs/python.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in page] == []
