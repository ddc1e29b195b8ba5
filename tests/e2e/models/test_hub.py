"""A model that is given by its id at the hub: real processes, and a hub on this machine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from support.processes.hub_server import Hub, files_of, hub_server
from support.processes.scheduler_process import scheduler_process
from support.processes.stack_process import EMBEDDED_FOLDER, running_stack
from support.waiting import until

NAME = "acme/embedded"
UNREAD = {"pytorch_model.bin": b"pickled", "README.md": b"# A model"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with the embedded model, which processes of this test use with an empty cache."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.add(NAME, files_of(EMBEDDED_FOLDER) | UNREAD)
        yield server


def test_run_downloads_once_and_serves_the_model_by_its_id(hub: Hub) -> None:
    with running_stack(model=NAME) as stack:
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0)
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).id == NAME
        answer = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "What is seven plus five?"}],
            temperature=0,
        )
        assert answer.choices[0].message.content == "Seven plus five is twelve."
        weights = [path for method, path in hub.requests if "safetensors" in path]
        assert len(weights) == 2, weights  # HEAD and GET: of one process
        hub.requests.clear()
        stack.kill_worker()
        until(lambda: any("worker-0 is ready again" in line for line in stack.log), 60)
        assert hub.requests == []
    assert not hub.downloaded() & UNREAD.keys()


def test_a_scheduler_downloads_no_weights(hub: Hub) -> None:
    with scheduler_process(["127.0.0.1:9"], "--model", NAME):
        until(lambda: "tokenizer.json" in hub.downloaded(), 30)
    assert "model.safetensors" not in hub.downloaded()


def test_a_command_says_why_it_cannot_start(hub: Hub) -> None:
    hub.repositories[NAME].gated = True
    for command in ("run", "worker"):
        ended = subprocess.run(
            [sys.executable, "-m", "pagewire.cli.main", command, "--model", NAME],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 1
        assert f"{NAME} is gated: ask for access at {hub.url}/{NAME}" in ended.stderr
        assert "Traceback" not in ended.stderr


def test_two_processes_may_download_at_once(hub: Hub) -> None:
    code = f"from pagewire.hub import fetch_model; print(fetch_model({NAME!r}))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    commit = hub.repositories[NAME].refs["main"]
    assert outputs == [f"{NAME}@{commit}"] * 2
    reads = [path for method, path in hub.requests if method == "GET"]
    assert sum("safetensors" in path for path in reads) == 1
