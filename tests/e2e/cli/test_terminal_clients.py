"""`generate`, `models`, `ps` and the keys, with the real commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.models import EMBEDDED_NAME
from pagewire.v1 import inference_pb2_grpc
from support.processes.stack_process import RunningStack, is_idle, running_stack
from support.waiting import until

PAGEWIRE = [sys.executable, "-m", "pagewire.cli.main"]
NOBODY = "http://127.0.0.1:9"


def pagewire(
    *arguments: str, given: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command with `given` as its standard input, which is empty otherwise."""
    variables = {name: text for name, text in os.environ.items() if name != "PAGEWIRE_API_KEY"}
    return subprocess.run(
        [*PAGEWIRE, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        input=given or "",
        env={**variables, **environment},
    )


GREEDY = ("--temperature", "0", "--max-tokens", "12")


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_url_may_end_with_v1(stack: RunningStack, suffix: str) -> None:
    done = pagewire("generate", "Hello!", "--url", stack.url + suffix, *GREEDY)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == pagewire("generate", "Hello!", "--url", stack.url, *GREEDY).stdout


def test_a_url_needs_no_scheme(stack: RunningStack) -> None:
    done = pagewire("models", "--url", stack.url.removeprefix("http://"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == [EMBEDDED_NAME, "2048", "yes", "embedded"]


@pytest.mark.parametrize("prompt", [[], ["-"]], ids=["none", "dash"])
def test_a_prompt_comes_from_standard_input(stack: RunningStack, prompt: list[str]) -> None:
    done = pagewire("generate", *prompt, "--url", stack.url, *GREEDY, given="Hello!\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == pagewire("generate", "Hello!", "--url", stack.url, *GREEDY).stdout


def test_a_prompt_from_standard_input_is_not_empty(stack: RunningStack) -> None:
    done = pagewire("generate", "--url", stack.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the prompt from standard input is empty" in done.stderr


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_prompt_that_is_not_utf8_is_refused(stack: RunningStack, errors: str) -> None:
    done = subprocess.run(
        [*PAGEWIRE, "generate", "--url", stack.url],
        capture_output=True,
        timeout=120,
        check=False,
        input=b"caf\xe9",
        env={**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"},
    )
    assert done.returncode == 1
    assert b"is not UTF-8; convert it" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_sampling_flags_reach_the_server(stack: RunningStack) -> None:
    """A sampled text differs with the seed; with top_k 1 it is the greedy one."""
    ask = ("generate", "Once upon a time", "--raw", "--url", stack.url, "--max-tokens", "16")
    greedy = pagewire(*ask, "--temperature", "0").stdout
    warm = ("--temperature", "2", "--seed")
    assert pagewire(*ask, *warm, "1").stdout != pagewire(*ask, *warm, "2").stdout
    for narrow in (("--top-k", "1"), ("--top-p", "0.0001"), ("--min-p", "1")):
        assert pagewire(*ask, *warm, "1", *narrow).stdout == greedy, narrow
    word = greedy.split()[2]
    assert (
        pagewire(*ask, "--temperature", "0", "--stop", word).stdout.strip()
        == greedy[: greedy.index(word)].strip()
    )
    for name in ("presence", "frequency", "repetition"):
        flag = f"--{name}-penalty"
        done = pagewire(*ask, flag, "9")
        assert done.returncode == 1
        assert f"{name}_penalty" in done.stderr, done.stderr


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_flag_that_is_not_finite_is_refused(stack: RunningStack, value: str) -> None:
    done = pagewire("generate", "Hello!", "--url", stack.url, "--top-p", value)
    assert done.returncode == 2
    assert done.stderr == (
        f"pagewire generate: Invalid value for --top-p: {value} is not finite; give a number\n"
    )


def test_generate_with_a_url_where_no_server_is_refuses_as_chat_does() -> None:
    generate, chat = (
        pagewire("generate", "Hello!", "--url", NOBODY),
        pagewire("chat", "--url", NOBODY),
    )
    assert generate.returncode == chat.returncode == 1
    assert generate.stderr == chat.stderr
    assert generate.stderr.startswith(f"pagewire: no server answers at {NOBODY}; start one with")


def test_generate_says_that_it_starts_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --url: no server listens on the default port in a test."""
    import socket

    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.skip("a server listens on port 8000 here")
    done = pagewire("generate", "Hello!", *GREEDY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr.startswith("No server answers at http://127.0.0.1:8000: starting one")
    assert len(done.stderr.splitlines()) == 1


def test_ps_shows_who_runs_and_the_load(
    stack: RunningStack, stub: inference_pb2_grpc.InferenceStub
) -> None:
    until(lambda: is_idle(stub), 10)
    done = pagewire("ps")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[1]: line for line in done.stdout.splitlines()}
    pids = {name: stack.pids(name) for name in ("gateway", "scheduler", "worker")}
    for name, [pid] in pids.items():
        assert rows[str(pid)].startswith(name), done.stdout
    gateway, scheduler, worker = (rows[str(pid)] for [pid] in pids.values())
    assert stack.url in gateway
    assert f"{EMBEDDED_NAME}; 0 requests open" in gateway
    assert stack.grpc_address in scheduler
    assert "0 running, 0 waiting; 0 of 599 blocks; 1 worker" in scheduler
    assert worker.endswith("serving")
    assert rows[str(stack.process.pid)].startswith("run")


def test_a_server_with_keys_says_which_variable_to_set(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = pagewire("keys", "new", "me", "--file", str(file)).stdout.strip()
    with running_stack("--api-keys-file", str(file)) as stack:
        for command in (
            ("generate", "Hello!", "--url", stack.url),
            ("chat", "--url", stack.url),
            ("models", "--url", stack.url),
        ):
            done = pagewire(*command)
            assert done.returncode == 1
            assert done.stderr == (
                f"pagewire: {stack.url}: the server wants an API key; set the environment variable "
                "PAGEWIRE_API_KEY, as in `export PAGEWIRE_API_KEY=KEY`\n"
            )
        wrong = pagewire("models", "--url", stack.url, PAGEWIRE_API_KEY="sk-wrong")
        assert (
            "does not know the API key in the environment variable PAGEWIRE_API_KEY" in wrong.stderr
        )
        right = pagewire("generate", "Hello!", "--url", stack.url, *GREEDY, PAGEWIRE_API_KEY=key)
        assert (right.returncode, right.stderr) == (0, "")
        curl = subprocess.run(
            ["curl", "-s", f"{stack.url}/v1/models"], capture_output=True, text=True, check=True
        )
        assert "PAGEWIRE_API_KEY" in json.loads(curl.stdout)["error"]["message"]
        listed = pagewire("ps").stdout
        assert "the server wants an API key" in listed
        assert "needs its token: set PAGEWIRE_SCHEDULER_TOKEN" in listed


@pytest.mark.parametrize("key", ["ab ", "a\nb", "é"])
def test_a_key_that_no_header_can_hold_is_named(stack: RunningStack, key: str) -> None:
    for command in (["models"], ["generate", "Hello!"], ["bench", "http", "--num-requests", "1"]):
        done = pagewire(*command, "--url", stack.url, PAGEWIRE_API_KEY=key)
        assert done.returncode == 1
        assert done.stderr.startswith(
            "pagewire: the API key in the environment variable PAGEWIRE_API_KEY has a character"
        )
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0", "1e30"])
def test_a_health_check_has_a_finite_time(stack: RunningStack, seconds: str) -> None:
    done = pagewire("health", stack.url, "--timeout", seconds)
    assert done.returncode == 2
    assert done.stderr.startswith("pagewire health: Invalid value for '--timeout': ")
