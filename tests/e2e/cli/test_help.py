"""The help of every command, as a user sees it at 80 columns and in a pipe."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pagewire.cli.main import make_app

PAGEWIRE = [sys.executable, "-m", "pagewire.cli.main"]


def every_command() -> Iterator[tuple[str, ...]]:
    """The words of each command, groups included."""
    from typer.main import get_command

    def walk(command: object, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        for name, sub in getattr(command, "commands", {}).items():
            yield from walk(sub, (*words, name))

    return walk(get_command(make_app()), ())


COMMANDS = sorted(every_command())

# Prints the help of many commands, each in a pipe and at 80 columns, as JSON.
_SHOW_ALL = """
import contextlib, io, json, os, sys
from pagewire.cli.main import make_app

def shown(words, columns):
    os.environ.pop("COLUMNS", None)
    os.environ.update(columns)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert not make_app()([*words, "--help"], standalone_mode=False, prog_name="pagewire")
    return text.getvalue()

given = json.load(sys.stdin)
print(json.dumps([[shown(words, {}), shown(words, {"COLUMNS": "80"})] for words in given]))
"""


def shown(*arguments: str, columns: str | None = None) -> str:
    """The output of a command in a pipe."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    if columns:
        environment["COLUMNS"] = columns
    done = subprocess.run(
        [*PAGEWIRE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, ""), (arguments, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def all_shown() -> dict[tuple[str, ...], tuple[str, str]]:
    """The help of each command in a pipe and at 80 columns, from one process for all."""
    done = subprocess.run(
        [sys.executable, "-c", _SHOW_ALL],
        input=json.dumps(COMMANDS),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return dict(zip(COMMANDS, map(tuple, json.loads(done.stdout)), strict=True))


def flags_of(words: tuple[str, ...]) -> list[str]:
    """The flags of a command, from typer."""
    from typer.main import get_command

    command = get_command(make_app())
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]
    return [
        opt
        for parameter in command.params
        if parameter.param_type_name == "option"
        for opt in parameter.opts
    ]


def test_there_are_commands() -> None:
    assert {("run",), ("bench", "http"), ("keys", "new"), ("help",)} <= set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_each_flag_whole_on_a_line_of_80_columns(
    words: tuple[str, ...], all_shown: dict[tuple[str, ...], tuple[str, str]]
) -> None:
    piped, at_80_columns = all_shown[words]
    assert piped == at_80_columns
    lines = piped.splitlines()
    assert max(map(len, lines)) <= 80
    assert not re.search(r"[^\x00-\x7f]", piped), "only characters that every terminal has"
    for flag in flags_of(words):
        having = [line for line in lines if re.match(rf"  (.*, )?{re.escape(flag)}(,| |$)", line)]
        assert len(having) == 1, (flag, having)
    options = piped.partition("Options:\n")[2].partition("\n\n")[0].splitlines()
    assert len(options) == 1 + len(set(flags_of(words))), "one line for each, and --help"
    assert all(re.match(r"  --[a-z0-9-]+(, -.)?  +\S", line) for line in options)


@pytest.mark.parametrize("columns", [None, "80"])
def test_a_process_of_its_own_shows_the_same(
    columns: str | None, all_shown: dict[tuple[str, ...], tuple[str, str]]
) -> None:
    for words in (("run",), ("bench", "http")):
        assert shown(*words, "--help", columns=columns) == all_shown[words][columns is not None]


@pytest.mark.parametrize("words", [("run",), ("bench", "offline"), ("worker",)], ids=" ".join)
def test_all_details_are_behind_help_all(words: tuple[str, ...]) -> None:
    text = shown(*words, "--help-all", columns="80")
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text
    for flag in flags_of(words):
        assert re.search(rf"^  {flag}\b", text, re.MULTILINE), flag
    environment = set(re.findall(r"PAGEWIRE_[A-Z_]+$", text, re.MULTILINE))
    assert "PAGEWIRE_WORKER_MAX_NUM_BATCHED_TOKENS" in environment
    assert "auto, float32, bfloat16, float16" in " ".join(text.split())


def test_a_terminal_of_80_columns_shows_the_same() -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*PAGEWIRE, "run", "--help"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "COLUMNS": "80"},
    )
    os.close(follower)
    seen = b""
    try:
        while piece := os.read(leader, 65536):
            seen += piece
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    assert process.wait(timeout=30) == 0
    assert seen.decode().replace("\r\n", "\n") == shown("run", "--help")


@pytest.mark.parametrize(
    "word", ["--max-waiting-seconds", "max_waiting_seconds", "PAGEWIRE_MAX_WAITING_SECONDS"]
)
def test_help_explains_one_flag(word: str) -> None:
    text = shown("help", word)
    assert "  --max-waiting-seconds NUMBER\n" in text
    assert "Default: 60.0.\n" in text
    assert "Environment: PAGEWIRE_MAX_WAITING_SECONDS\n" in text
    assert "Commands: run, scheduler, bench speculative\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_explains_a_switch_and_a_command() -> None:
    assert "  --prefix-caching / --no-prefix-caching\n" in shown("help", "--no-prefix-caching")
    assert shown("help", "bench", "http") == shown("bench", "http", "--help-all")
    assert shown("help") == shown("--help")


def test_an_unknown_flag_is_named_with_the_nearest() -> None:
    command = [*PAGEWIRE, "help", "--num-slot"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "--num-slot is not a flag, variable or command; did you mean --num-slots" in done.stderr
