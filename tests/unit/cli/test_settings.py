"""Settings: from dataclass fields to values and back."""

import math
from dataclasses import dataclass
from typing import Literal

import pytest

from pagewire.cli.settings.settings import Setting, arguments, build, settings_of, union_of
from pagewire.config import (
    GatewayConfig,
    SchedulerConfig,
    SimulatedWorkerConfig,
    WorkerConfig,
    setting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    port: int = setting(1, "A port.")
    rate: float | None = setting(None, "A rate.")
    mode: Literal["slow", "fast"] = setting("slow", "A mode.")
    name: str | None = setting(None, "A name.")
    cache: bool = setting(True, "A switch.")


def number(kind: type, minimum: float | None = None, maximum: float | None = None) -> Setting:
    return Setting("n", kind, (), None, "", "N", minimum, maximum)


def test_fields_become_settings() -> None:
    found = settings_of(Sample)
    assert {name: (s.kind, s.choices, s.flag, s.env) for name, s in found.items()} == {
        "port": (int, (), "--port", "PAGEWIRE_PORT"),
        "rate": (float, (), "--rate", "PAGEWIRE_RATE"),
        "mode": (str, ("slow", "fast"), "--mode", "PAGEWIRE_MODE"),
        "name": (str, (), "--name", "PAGEWIRE_NAME"),
        "cache": (bool, (), "--cache", "PAGEWIRE_CACHE"),
    }


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "80", 80),
        ("rate", "1e-3", 0.001),
        ("mode", "fast", "fast"),
        ("name", "07", "07"),
        ("cache", "off", False),
        ("cache", "True", True),
    ],
)
def test_texts_are_parsed_by_the_kind_of_the_field(name: str, text: str, value: object) -> None:
    parsed = settings_of(Sample)[name].parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("port", "1.5", "'1.5' is not a whole number"),
        ("port", "", "'' is not a whole number"),
        ("rate", "quick", "'quick' is not a number"),
        ("mode", "medium", "'medium' is not a choice; give one of slow, fast"),
        ("cache", "maybe", "'maybe' is neither true nor false"),
    ],
)
def test_an_invalid_value_is_named_with_the_remedy(name: str, text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        settings_of(Sample)[name].parse(text)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("given", "text", "words"),
    [
        (number(int, 1, 9), "10", "10 is out of range; give 1 to 9"),
        (number(int, 1), "0", "0 is out of range; give at least 1"),
        (number(float, None, 1), "1.5", "1.5 is out of range; give at most 1"),
        (number(float, 0, 1), "nan", "nan is out of range; give 0 to 1"),
        (number(float), "nan", "nan is out of range; give a number"),
        (number(float, 0), "inf", "inf is out of range; give at least 0"),
        (number(float, 0), "1e999", "1e999 is out of range; give at least 0"),
        (number(int, 2, 2**31 - 1), "1", "1 is out of range; give 2 to 2147483647"),
    ],
)
def test_numbers_out_of_range_are_refused(given: Setting, text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        given.parse(text)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("config_type", "name", "texts"),
    [
        (WorkerConfig, "max_model_len", ("1", "0", "-1", str(2**31))),
        (WorkerConfig, "gpu_memory_utilization", ("0", "-0.5", "1.1")),
        (WorkerConfig, "num_slots", ("0", str(10**6))),
        (WorkerConfig, "num_blocks", ("1", str(2**31))),
        (WorkerConfig, "host_memory_gb", ("-1", "inf", "1e12")),
        (WorkerConfig, "worker_max_num_batched_tokens", ("0", str(2**32))),
        (WorkerConfig, "torch_threads", ("0", "10000")),
        (WorkerConfig, "seed", ("-1", str(2**63))),
        (WorkerConfig, "step_timeout", ("0", "inf")),
        (SchedulerConfig, "memory_threshold", ("0", "1.1")),
        (SchedulerConfig, "long_prompt_share", ("0", "1.1")),
        (SchedulerConfig, "drain_timeout", ("-1", "inf")),
        (GatewayConfig, "max_body_bytes", ("0", str(2**31))),
        (SimulatedWorkerConfig, "count", ("0", "100000")),
    ],
)
def test_values_that_make_no_sense_are_refused(
    config_type: type, name: str, texts: tuple[str, ...]
) -> None:
    for text in texts:
        with pytest.raises(ValueError, match="out of range; give "):
            settings_of(config_type)[name].parse(text)


def test_requests_may_wait_without_limit() -> None:
    waits = settings_of(SchedulerConfig)["max_waiting_seconds"]
    assert waits.parse("inf") == math.inf
    with pytest.raises(ValueError, match=r"0 is out of range; give 0\.001 to inf"):
        waits.parse("0")


@pytest.mark.parametrize("config_type", [GatewayConfig, SchedulerConfig, WorkerConfig, Sample])
def test_arguments_give_back_the_same_configuration(config_type: type) -> None:
    settings = settings_of(config_type)
    changed = {name: _another(s) for name, s in settings.items()}
    for values in ({}, changed):
        config = config_type(**values)
        given = dict(flag.removeprefix("--").split("=", 1) for flag in _with_values(config))
        parsed = {name.replace("-", "_"): text for name, text in given.items()}
        again = {name: settings[name].parse(text) for name, text in parsed.items()}
        assert config_type(**again) == config


def _another(s: Setting) -> object:
    if s.choices:
        return s.choices[-1]
    return {bool: False, int: 7, float: math.pi / 10, str: "a b=c,d"}[s.kind]


def _with_values(config: object) -> list[str]:
    """The arguments, with switches written as values."""
    flags = []
    for flag in arguments(config):
        name, equals, value = flag.partition("=")
        if equals:
            flags.append(f"{name}={value}")
        elif name.startswith("--no-"):
            flags.append(f"--{name[5:]}=false")
        else:
            flags.append(f"{name}=true")
    return flags


def test_the_first_setting_of_a_name_counts_and_build_takes_its_own() -> None:
    union = union_of((WorkerConfig, SchedulerConfig))
    assert union["model"].help == settings_of(WorkerConfig)["model"].help
    values = {name: s.default for name, s in union.items()} | {"model": "m"}
    assert build(SchedulerConfig, values, workers="w:1") == SchedulerConfig(
        model="m", workers="w:1"
    )
