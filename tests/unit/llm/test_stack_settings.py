"""The settings of an LLM's processes."""

import math

import pytest

from pagewire.llm.stack_settings import llm_settings, stack_values


def test_defaults_are_those_of_a_stack_without_refusals():
    values = stack_values(None, {})
    assert values["model"] == "embedded"
    assert values["max_waiting_seconds"] == math.inf
    assert values["workers"] == 1
    assert values.keys() == llm_settings().keys()


def test_given_values_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("PAGEWIRE_NUM_SLOTS", "8")
    monkeypatch.setenv("PAGEWIRE_NUM_BLOCKS", "100")
    values = stack_values("/model", {"num_slots": 4, "prefix_caching": False})
    assert (values["num_slots"], values["num_blocks"], values["model"]) == (4, 100, "/model")
    assert values["prefix_caching"] is False


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"num_slot": 4}, TypeError, "did you mean num_slots"),
        ({"grpc_port": 4}, TypeError, "not a setting of an LLM"),
        ({"num_slots": 0}, ValueError, "num_slots: 0 is out of range; give 1 to 65536"),
        ({"num_slots": 1.5}, ValueError, "not a whole number"),
        ({"num_slots": None}, ValueError, "num_slots"),
        ({"prefix_caching": "maybe"}, ValueError, "neither true nor false"),
        ({"dtype": "int8"}, ValueError, "not a choice"),
    ],
)
def test_a_setting_that_is_not_valid_is_named(given, error, message):
    with pytest.raises(error, match=message):
        stack_values(None, given)


def test_a_variable_that_is_not_valid_is_named(monkeypatch):
    monkeypatch.setenv("PAGEWIRE_NUM_SLOTS", "many")
    with pytest.raises(ValueError, match="PAGEWIRE_NUM_SLOTS: 'many' is not a whole number"):
        stack_values(None, {})
