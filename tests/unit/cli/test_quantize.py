"""`pagewire quantize`: its output and its refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from pagewire.cli.errors import CommandError
from pagewire.cli.main import make_app


def run(*words: str) -> Any:
    return make_app()(["quantize", *words], standalone_mode=False)


def test_the_embedded_model_in_four_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "small"
    run("embedded", "--to", "int4", "--group-size", "32", "--output", str(output))
    assert "GB of weights in int4, of 0.015 GB" in capsys.readouterr().out
    config = json.loads((output / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    assert groups["group_0"]["weights"]["group_size"] == 32
    assert (output / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "fp8", "--group-size", "64"], "fp8 has a scale for each channel"),
        (["--to", "int4", "--group-size", "48"], "48 is not a power of two of at least"),
    ],
)
def test_wrong_options(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        run("embedded", *words, "--output", str(tmp_path / "small"))


def test_a_folder_that_exists_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="exists; give the name"):
        run("embedded", "--to", "fp8", "--output", str(tmp_path))
