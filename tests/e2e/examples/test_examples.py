"""Each script in examples/, run as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

from support.processes.stack_process import RunningStack

EXAMPLES = Path(__file__).parents[3] / "examples"
# command_model: see tests/e2e/command.
TESTED = (
    "chat",
    "command_model",
    "grpc_client",
    "offline_generation",
    "openai_client",
    "streaming",
)


def output_of(name: str, *arguments: str) -> str:
    """The output of an example, which must end without an error or a warning."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_every_example_is_tested_here():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == list(TESTED)


def test_offline_generation():
    lines = output_of("offline_generation").splitlines()
    assert [line.split(" -> ")[0] for line in lines] == [
        "'Once upon a time'",
        "'The fox'",
        "'The opposite of hot is'",
    ]
    assert all(len(line.split(" -> ")[1]) > 10 for line in lines)


def test_chat():
    output = output_of("chat")
    assert "> Hello! What can you do?\n" in output
    assert output.count("(stop, log probability -") + output.count("(length, log") == 3
    assert "One, two, three, four, five." in output


def test_streaming():
    lines = output_of("streaming").splitlines()
    animals = [line.split(":")[0] for line in lines]
    assert set(animals) == {"fox", "bear", "cat"}
    assert all(animals.count(animal) > 5 for animal in set(animals))
    # In parallel: each has begun before the first has ended.
    ends = [len(animals) - animals[::-1].index(animal) for animal in set(animals)]
    assert max(animals.index(animal) for animal in set(animals)) < min(ends)


def test_openai_client(stack: RunningStack):
    *answer, tokens = output_of("openai_client", stack.url).splitlines()
    assert len("".join(answer)) > 5
    assert int(tokens.split()[0]) > 3


def test_grpc_client(stack: RunningStack):
    model, *pieces, end = output_of("grpc_client", stack.grpc_address).splitlines()
    assert re.fullmatch(r"pagewire-chat: \d+ tokens, up to 2048 in a sequence", model)
    assert pieces[0].startswith("[")
    assert end in ("FINISH_REASON_LENGTH", "FINISH_REASON_STOP")
