"""Several models: their names, their own settings, and malformed entries."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from pagewire.cli.settings.model_entries import ModelEntry, parse_entry, read_entries, with_models
from pagewire.cli.settings.options import configured
from pagewire.cli.settings.settings import settings_of
from pagewire.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    workers: int = setting(1, "Workers.", minimum=1)
    num_slots: int = setting(8, "Slots.")
    cache: bool = setting(True, "A switch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Own):
    model: str = setting("embedded", "A model.")
    served_model_name: str | None = setting(None, "A name.")
    port: int = setting(80, "A port.")


OWN = settings_of(Own)
NONE = {"served_model_name": None}


def run(*arguments: str) -> dict[str, Any]:
    """The values that a command receives from a command line."""
    app = typer.Typer()

    @app.command()
    @configured(settings_of(Sample), OWN)
    def command(values: dict[str, Any]) -> dict[str, Any]:
        return values

    result: dict[str, Any] = app(list(arguments), standalone_mode=False)
    return result


def refusal(*arguments: str) -> str:
    """Why a command line is refused."""
    with pytest.raises(typer.BadParameter) as refused:
        run(*arguments)
    return refused.value.format_message()


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("embedded", ModelEntry("pagewire-chat", "embedded", False, {})),
        ("org/name@v1", ModelEntry("org/name", "org/name@v1", False, {})),
        ("/with,comma", ModelEntry("with,comma", "/with,comma", False, {})),
        ("a=/models/b", ModelEntry("a", "/models/b", True, {})),
        ("org/a:7b=b,workers=2", ModelEntry("org/a:7b", "b", True, {"workers": 2})),
        (
            "org/b,num-slots=4,cache=no",
            ModelEntry("org/b", "org/b", False, {"num_slots": 4, "cache": False}),
        ),
    ],
)
def test_a_text_has_a_name_a_model_and_settings(text: str, entry: ModelEntry) -> None:
    assert parse_entry(text, OWN) == entry


def test_an_existing_folder_is_the_model_whatever_its_path_has(tmp_path: Path) -> None:
    folder = tmp_path / "a=b,workers=2"
    folder.mkdir()
    assert parse_entry(str(folder), OWN).source == str(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=", "'a=' has no model after the name 'a'; give NAME=MODEL"),
        ("=b", "'' cannot name a model"),
        ("a b=c", "'a b' cannot name a model"),
        ("-a=c", "'-a' cannot name a model"),
        ("ä=c", "'ä' cannot name a model"),
        ("a" * 129 + "=c", "cannot name a model"),
        ("a=b,workers", "'workers' of the model 'a' has no value; give SETTING=VALUE"),
        ("a=b,", "'' of the model 'a' has no value"),
        ("a=b,workers=0", "the model 'a': workers: 0 is out of range; give at least 1"),
        ("a=b,workers=two", "the model 'a': workers: 'two' is not a whole number"),
        ("a=b,worker=2", "'worker' of its own; the nearest valid one is 'workers'"),
        ("a=b,port=1", "the model 'a' cannot have a setting 'port' of its own"),
        ("a=b,workers=1,workers=2", "the model 'a' has workers twice"),
    ],
)
def test_what_is_malformed_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_entry(text, OWN)
    assert words in str(refused.value)
    assert words in refusal("--model", text)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([], "must hold a mapping"),
        ({}, "must hold a mapping"),
        ({"a": "b"}, "the model 'a' must have settings as `key: value`"),
        ({"a": {"workers": 2}}, "the model 'a' has no key `model`"),
        ({"a": {"model": ["b"]}}, "the model 'a' has no key `model`"),
        ({"a": {"model": "b", "workers": [2]}}, "workers must be a single value"),
        ({"a": {"model": "b", "workers": 0}}, "workers: 0 is out of range"),
        ({"a": {"model": "b", "port": 1}}, "cannot have a setting 'port' of its own"),
        ({"a b": {"model": "b"}}, "'a b' cannot name a model"),
    ],
)
def test_what_is_malformed_in_a_file_is_named(raw: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read_entries(raw, OWN)


def test_one_model_is_among_the_values() -> None:
    assert "models" not in run()
    values = run("--model", "a=b,workers=3", "--workers", "2")
    assert (values["model"], values["served_model_name"], values["workers"]) == ("b", "a", 3)
    assert "models" not in values
    values = run("--model", "b", "--served-model-name", "a")
    assert (values["model"], values["served_model_name"]) == ("b", "a")


def test_several_models_have_what_is_their_own() -> None:
    values = run("--model", "a=b,workers=3", "--model", "org/c", "--workers", "2")
    assert values["workers"] == 2
    assert values["models"] == (
        {"model": "b", "served_model_name": "a", "workers": 3},
        {"model": "org/c", "served_model_name": "org/c"},
    )


def test_flags_override_the_environment_and_that_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "port: 9\nmodels:\n  a: {model: b, cache: false}\n  c: {model: d, workers: 2}\n"
    )
    given = ("--config", str(file))
    assert run(*given)["models"] == (
        {"model": "b", "served_model_name": "a", "cache": False},
        {"model": "d", "served_model_name": "c", "workers": 2},
    )
    monkeypatch.setenv("PAGEWIRE_MODEL", "x=y")
    values = run(*given)
    assert (values["model"], values["port"], "models" in values) == ("y", 9, False)
    values = run(*given, "--model", "p=q", "--model", "r=s")
    assert [own["model"] for own in values["models"]] == ["q", "s"]


def test_the_environment_may_have_several_models_or_a_folder_with_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_MODEL", "a=b c=d")
    assert [own["model"] for own in run()["models"]] == ["b", "d"]
    folder = tmp_path / "my model"
    folder.mkdir()
    monkeypatch.setenv("PAGEWIRE_MODEL", str(folder))
    assert run()["model"] == str(folder)


def test_names_are_unique_and_given_in_one_place(tmp_path: Path) -> None:
    twice = refusal("--model", "a=b", "--model", "a=c")
    assert "two models have the name 'a': b and c; give each another one" in twice
    follows = refusal("--model", "x/a", "--model", "x/a@v2")
    assert "two models have the name 'x/a'" in follows
    unfit = refusal("--model", "a=b", "--model", "/models/my model")
    assert "'my model' cannot name a model; give NAME=MODEL" in unfit
    for models in (("a=b",), ("a", "b")):
        flags = [word for model in models for word in ("--model", model)]
        both = refusal(*flags, "--served-model-name", "x")
        assert "--served-model-name x is for a single model without a name" in both
    file = tmp_path / "both.yaml"
    file.write_text("model: a\nmodels: {b: {model: c}}\n")
    assert f"{file}: has both model and models" in refusal("--config", str(file))
    file.write_text("models: {b: {model: c, workers: 0}}\n")
    assert f"{file}: the model 'b': workers: 0 is out of range" in refusal("--config", str(file))


def test_models_of_a_file_may_be_one() -> None:
    [entry] = read_entries({"a": {"model": "b", "workers": None}}, OWN)
    assert with_models(NONE, [entry]) == {"model": "b", "served_model_name": "a"}
