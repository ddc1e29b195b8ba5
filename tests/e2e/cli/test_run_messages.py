"""The output of `pagewire run`: examples that work as copied, and errors, printed once."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from pagewire.models import EMBEDDED_NAME
from support.processes.stack_process import EMBEDDED_FOLDER, RunningStack, running_stack
from support.waiting import until

RUN = [sys.executable, "-m", "pagewire.cli.main", "run"]


def ended(*flags: str) -> subprocess.CompletedProcess[str]:
    """`run` with flags that it must refuse."""
    return subprocess.run(
        [*RUN, "--port", "0", "--grpc-port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_in_shell(command: str, **environment: str) -> str:
    """The output of a copied command."""
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PATH": "/usr/bin:/bin", **environment},
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def example(stack: RunningStack, start: str) -> str:
    """A command of the printed block, as it is copied."""
    found = re.search(rf"^    ({re.escape(start)}(?:.*\\\n)?.*)$", stack.output, re.MULTILINE)
    assert found is not None, stack.output
    return found[1]


def streamed_text(answer: str) -> str:
    """The text of server-sent events of either endpoint."""
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


def test_the_printed_commands_carry_the_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    make = [sys.executable, "-m", "pagewire.cli.main", "keys", "new", "me", "--file", str(file)]
    key = subprocess.run(make, capture_output=True, text=True, check=True).stdout.strip()
    with running_stack("--api-keys-file", str(file)) as stack:
        assert "    export PAGEWIRE_API_KEY=" in stack.output
        curl = example(stack, "curl -N ")
        assert '-H "Authorization: Bearer $PAGEWIRE_API_KEY"' in curl
        assert streamed_text(run_in_shell(curl, PAGEWIRE_API_KEY=key)).strip()
        refused = json.loads(run_in_shell(curl, PAGEWIRE_API_KEY="sk-other"))
        assert "PAGEWIRE_API_KEY" in refused["error"]["message"]


def test_without_keys_the_printed_commands_work_as_they_are(stack: RunningStack) -> None:
    curl = example(stack, "curl -N ")
    assert "Authorization" not in curl
    assert f"    {stack.url}/    in a browser: " in stack.output
    assert httpx.get(f"{stack.url}/", trust_env=False).status_code == 200
    assert streamed_text(run_in_shell(curl)).strip()
    chat = next(line.strip() for line in stack.output.splitlines() if " chat --url" in line)
    assert chat.split(" chat ")[0].endswith("bin/pagewire"), "it is not on this path"
    shown = run_in_shell(f"echo Hello | {chat} --max-tokens 4")
    assert f"{EMBEDDED_NAME} at {stack.url}" in shown


def test_the_example_of_a_model_without_chat_template_is_a_completion(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(EMBEDDED_FOLDER, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with running_stack(model=folder) as stack:
        curl = example(stack, "curl -N ")
        assert "/v1/completions" in curl
        assert streamed_text(run_in_shell(curl)).strip()
        generate = next(line for line in stack.output.splitlines() if " generate " in line)
        assert run_in_shell(f"{generate.strip()} --max-tokens 4").strip()
        chat = [sys.executable, "-m", "pagewire.cli.main", "chat", "--url", stack.url]
        done = subprocess.run(chat, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "plain has no chat template, so it cannot chat" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"architectures": ["Qwen3ForCausalLM"],\n "hidden_size": }', "line 2, column 17"),
        ("[1]", "it is not a JSON object, but a list"),
        ("", "line 1, column 1"),
    ],
    ids=["syntax", "list", "empty"],
)
def test_a_malformed_config_is_named_with_its_line(
    tmp_path: Path, content: str, words: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    done = ended("--model", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"pagewire: {file} cannot be read: {words}")
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_value_in_a_config_is_named_with_its_line(tmp_path: Path) -> None:
    config = json.loads((EMBEDDED_FOLDER / "config.json").read_text())
    config["hidden_size"] = "many"
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config, indent=1))
    line = 1 + next(
        n for n, text in enumerate(file.read_text().splitlines()) if '"hidden_size"' in text
    )
    done = ended("--model", str(tmp_path), "--skip-tokenizer", "--load-format", "dummy")
    assert done.returncode == 1
    named = f"{file}, line {line}: hidden_size is 'many'; it must be a positive integer"
    assert done.stderr.count(named) == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_said_once_with_how_to_get_it(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    done = ended("--model", str(missing))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"pagewire: model '{missing}': no folder with a config.json at")
    assert "`pagewire run --model Qwen/Qwen3-0.6B` downloads that model" in done.stderr


@pytest.mark.parametrize("flag", ["--tokenizer", "--draft-model"])
def test_a_missing_folder_beside_the_model_is_said_before_anything_starts(
    tmp_path: Path, flag: str
) -> None:
    missing = tmp_path / "nothing"
    done = ended(flag, str(missing))
    assert done.returncode == 1
    assert done.stderr.startswith(f"pagewire: {flag}: model '{missing}': no folder with a config")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("several", [False, True])
def test_a_missing_chat_template_is_said_before_anything_starts(
    tmp_path: Path, several: bool
) -> None:
    missing = tmp_path / "nothing.jinja"
    flags = ["--chat-template", str(missing)]
    if several:  # the first would be downloaded
        flags = ["--model", "first=acme/tiny", "--model", f"b=embedded,chat_template={missing}"]
    done = ended(*flags)
    assert done.returncode == 1
    named = "b: " if several else ""
    reason = f"--chat-template {missing} cannot be read: No such file or directory; give a file"
    assert done.stderr.startswith(f"pagewire: {named}{reason}")
    assert len(done.stderr.splitlines()) == 1


def open_stream(stack: RunningStack) -> threading.Thread:
    """A client that reads a long answer to its end."""
    begun = threading.Event()

    def read() -> None:
        body = {
            "model": EMBEDDED_NAME,
            "prompt": "Once",
            "max_tokens": 1900,
            "stream": True,
            "ignore_eos": True,
        }
        url = f"{stack.url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as answer:
                for _ in answer.iter_lines():
                    begun.set()
        except httpx.TransportError:
            pass

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    return thread


def test_ctrl_c_says_that_it_drains_and_a_second_one_ends_at_once() -> None:
    with running_stack("--num-slots", "8") as stack:
        reader = open_stream(stack)
        stack.process.send_signal(signal.SIGINT)
        draining = "draining: open requests have up to 30 s to finish; Ctrl-C again ends everything"
        until(lambda: any(draining in line for line in stack.log), 10)
        time.sleep(0.2)
        assert stack.process.poll() is None, "a request is open"
        second = time.monotonic()
        stack.process.send_signal(signal.SIGINT)
        stack.process.wait(timeout=20)
        assert time.monotonic() - second < 10
        until(lambda: any("ending at once" in line for line in stack.log), 5)
        reader.join(timeout=20)
        assert not reader.is_alive()
