"""Options: precedence, configuration files, error messages."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import typer

from pagewire.cli import main
from pagewire.cli.settings.options import configured
from pagewire.cli.settings.settings import settings_of
from pagewire.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    num_blocks: int = setting(1, "Blocks.")
    mode: Literal["slow", "fast"] = setting("slow", "A mode.")
    name: str | None = setting(None, "A name.")
    cache: bool = setting(True, "A switch.")


def run(*arguments: str) -> dict[str, Any]:
    """The values that a command receives from a command line."""
    app = typer.Typer()

    @app.command()
    @configured(settings_of(Sample))
    def command(values: dict[str, Any], extra: int = 0) -> dict[str, Any]:
        return {**values, "extra": extra}

    result: dict[str, Any] = app(list(arguments), standalone_mode=False)
    return result


DEFAULTS = {"num_blocks": 1, "mode": "slow", "name": None, "cache": True, "extra": 0}


def test_defaults_are_the_dataclass_s() -> None:
    assert run() == DEFAULTS


def test_a_function_keeps_parameters_of_its_own() -> None:
    assert run("--extra", "3", "--num-blocks", "2") == {**DEFAULTS, "extra": 3, "num_blocks": 2}


def test_switches_have_two_flags() -> None:
    assert run("--no-cache")["cache"] is False
    assert run("--cache")["cache"] is True


def test_a_flag_overrides_the_environment_then_the_file_then_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("num_blocks: 2\nmode: fast\nname: from file\ncache: false\n")
    assert run("--config", str(file)) == {
        "num_blocks": 2,
        "mode": "fast",
        "name": "from file",
        "cache": False,
        "extra": 0,
    }
    monkeypatch.setenv("PAGEWIRE_NUM_BLOCKS", "3")
    monkeypatch.setenv("PAGEWIRE_NAME", "from environment")
    assert run("--config", str(file))["num_blocks"] == 3
    values = run("--config", str(file), "--name", "from flag")
    assert (values["name"], values["num_blocks"], values["mode"]) == ("from flag", 3, "fast")


def test_json_files_and_nulls(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"num_blocks": 5, "name": None}))
    assert run("--config", str(file)) == {**DEFAULTS, "num_blocks": 5}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("numblocks: 2", "unknown key 'numblocks'; the nearest valid one is 'num_blocks'"),
        ("num-blocks: 2", "unknown key 'num-blocks'; the nearest valid one is 'num_blocks'"),
        ("zzz: 2", "unknown key 'zzz'; valid ones are cache, mode, name, num_blocks"),
        ("num_blocks: many", "num_blocks: 'many' is not a whole number"),
        ("num_blocks: 1.5", "num_blocks: '1.5' is not a whole number"),
        ("num_blocks: [1]", "num_blocks must be a single value, not a list"),
        ("- 1", "must hold settings as `key: value`, not a list"),
        ("a: [", "not valid"),
        ("num_blocks: 1\nnum_blocks: 2", "it has the key 'num_blocks' 2 times; keep one"),
    ],
)
def test_errors_of_a_file_name_the_file_and_the_key(
    tmp_path: Path, content: str, words: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(typer.BadParameter) as caught:
        run("--config", str(file))
    assert caught.value.message.startswith(str(file))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_json_file_has_each_key_once(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    for content, words in (
        ('{"num_blocks": 1, "num_blocks": 2}', "it has the key 'num_blocks' 2 times"),
        ("[" * 100_000, "not valid"),
    ):
        file.write_text(content)
        with pytest.raises(typer.BadParameter, match=words):
            run("--config", str(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="cannot be read"):
        run("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["worker", "--block-size", "x"], {}, ["--block-size", "'x'", "whole number"]),
        (["worker"], {"PAGEWIRE_OPS": "cuda"}, ["PAGEWIRE_OPS", "'cuda'", "triton"]),
        (["run", "--workers", "0"], {}, ["--workers", "0 is out of range", "1 to 1024"]),
        (["gateway", "--prot", "1"], {}, ["--prot"]),
        (["wroker"], {}, ["wroker", "Did you mean 'worker'?"]),
        (["serve"], {}, ["No such command 'serve'; see `pagewire --help`"]),
        (["run", "org/name"], {}, ["extra argument(s) (org/name); see `pagewire run --help`"]),
        (["run", "--zzzz", "2"], {}, ["No such option: --zzzz; see `pagewire run --help`"]),
        (["keys", "new"], {}, ["Missing argument 'name'; see `pagewire keys new --help`"]),
        (["run", "--port"], {}, ["'--port' requires an argument."]),
    ],
)
def test_bad_values_end_with_status_2_and_one_line(
    arguments: list[str],
    environment: dict[str, str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["pagewire", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("PAGEWIRE_NUM_SLOT", "PAGEWIRE_NUM_SLOT (did you mean PAGEWIRE_NUM_SLOTS?)"),
        ("PAGEWIRE_WORKERS", "PAGEWIRE_WORKERS (did you mean PAGEWIRE_NUM_WORKERS?)"),
        ("PAGEWIRE_CONFIG", "PAGEWIRE_CONFIG"),
        ("PAGEWIRE_OTHER_THINGS", "PAGEWIRE_OTHER_THINGS"),
    ],
)
def test_a_variable_without_effect_is_named(
    variable: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ("PAGEWIRE_MODEL", "PAGEWIRE_API_KEYS", "PAGEWIRE_SCHEDULERS", "PAGEWIRE_WORKER_TOKEN")
    for name in (*known, variable):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr("sys.argv", ["pagewire", "run", "--port", "x"])
    with pytest.raises(SystemExit):
        main.main()
    first = capsys.readouterr().err.splitlines()[0]
    assert first == f"pagewire run: not a setting, so it has no effect: {said}"
