"""Downloads from a hub on this machine: which files, resumption, revisions, and every refusal."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire import hub as hub_module
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.model_files import with_model_files
from pagewire.hub import DownloadError, fetch_model
from pagewire.models import resolve_model, resolve_tokenizer, served_name
from support.processes.hub_server import Hub, Repository, hub_server

NAME = "acme/tiny"
SMALL = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"a tokenizer": 1}',
    "tokenizer_config.json": b'{"bos_token": "<s>"}',
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
}
UNREAD = {
    "README.md": b"# A model",
    "pytorch_model.bin": b"pickled",
    "model-q4.gguf": b"quantized",
    "onnx/model.onnx": b"a graph",
    "original/consolidated.00.pth": b"pickled, too",
    "consolidated.safetensors": b"the same weights under other names",
    "modeling_tiny.py": b"raise SystemExit('remote code must not run')",
}
SHARDS = {"model-00001-of-00002.safetensors": b"1" * 3000, "model-00002-of-00002.safetensors": b"2"}
INDEX = {
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {f"layer.{i}": name for i, name in enumerate(SHARDS)}}
    ).encode()
}
SINGLE = {"model.safetensors": bytes(range(256)) * 4096}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub, an empty cache, and no token of this machine."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def fetch(model: str = NAME, **needs: bool) -> tuple[str, list[str]]:
    lines: list[str] = []
    return fetch_model(model, **needs, report=lines.append), lines


def refusal(model: str = NAME, **needs: bool) -> str:
    with pytest.raises(DownloadError) as caught:
        fetch(model, **needs)
    return str(caught.value)


def test_only_the_files_that_are_read_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, SMALL | INDEX | SHARDS | UNREAD)
    pinned, lines = fetch()
    commit = hub.repositories[NAME].refs["main"]
    assert pinned == f"{NAME}@{commit}"
    assert hub.downloaded() == set(SMALL | INDEX | SHARDS)
    folder = resolve_model(pinned)
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    for name, data in (SMALL | SHARDS).items():
        assert (folder / name).read_bytes() == data
    assert lines[0] == f"downloading {NAME} from {hub.url}"
    assert str(folder) in lines[-1]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    """Lines without a terminal, and a bar in a terminal."""
    monkeypatch.setattr(hub_module, "_REPORT_INTERVAL", 0.01)
    monkeypatch.setattr(hub_module, "_BAR_INTERVAL", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    hub.add(NAME, SMALL | {"model.safetensors": bytes(50_000_000)})
    hub.delay = 0.3
    _, lines = fetch()
    shown = capsys.readouterr().err
    if terminal:
        assert "weights" in shown
        assert "50.0 MB" in shown
        assert len(lines) == 2
    else:
        assert shown == ""
        assert any(line.startswith(f"downloading {NAME}: ") for line in lines[1:-1])
        assert all(line.endswith(" of 50.0 MB") for line in lines[1:-1])


def test_a_service_downloads_what_it_needs(hub: Hub) -> None:
    hub.add(NAME, SMALL | SINGLE | UNREAD)
    fetch(weights=False)
    assert hub.downloaded() == set(SMALL)
    hub.requests.clear()
    fetch(tokenizer=False)
    assert hub.downloaded() == set(SINGLE)


def test_what_is_there_is_used_without_asking(hub: Hub) -> None:
    repository = hub.add(NAME, SMALL | SINGLE)
    first, _ = fetch()
    hub.requests.clear()
    repository.commit(SMALL | SINGLE | {"config.json": b'{"model_type": "llama"}'})
    for model in (NAME, first):
        assert fetch(model) == (first, [])
        assert fetch(model, weights=False) == (first, [])
    assert hub.requests == []


def test_a_revision_has_files_of_its_own(hub: Hub) -> None:
    repository = hub.add(NAME, SMALL | SINGLE)
    old = repository.commit(SMALL | {"model.safetensors": b"old"}, ref="v1")
    by_tag, _ = fetch(f"{NAME}@v1")
    assert by_tag == f"{NAME}@{old}"
    assert (resolve_model(by_tag) / "model.safetensors").read_bytes() == b"old"
    newest, _ = fetch()
    assert newest == f"{NAME}@{repository.refs['main']}"
    assert (resolve_model(NAME) / "model.safetensors").read_bytes() == SINGLE["model.safetensors"]
    assert resolve_model(f"{NAME}@v1") == resolve_model(by_tag)


def test_a_broken_download_goes_on_where_it_broke(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # before a retry
    data = bytes(range(256)) * 200_000  # several chunks
    hub.add(NAME, SMALL | {"model.safetensors": data})
    hub.breaks = [("model.safetensors", 30_000_000)]
    pinned, _ = fetch()
    [(name, resumed_at)] = hub.ranges
    assert name == "model.safetensors"
    assert 0 < int(resumed_at.removeprefix("bytes=").rstrip("-")) <= 30_000_000
    assert (resolve_model(pinned) / "model.safetensors").read_bytes() == data


def test_a_second_try_keeps_complete_files(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.add(NAME, SMALL | INDEX | SHARDS)
    broken, whole = SHARDS
    hub.breaks = [(broken, 0)] * 20
    assert "complete files are kept" in refusal()
    hub.breaks.clear()
    hub.requests.clear()
    pinned, _ = fetch()
    assert hub.downloaded() == {broken}
    assert (resolve_model(pinned) / whole).read_bytes() == SHARDS[whole]


def test_a_download_that_was_begun_keeps_its_commit(hub: Hub) -> None:
    """Another process may use the commit, so it stays until the hub no longer has it."""
    repository = hub.add(NAME, SMALL | SINGLE)
    begun, _ = fetch(weights=False)
    newer = repository.commit(SMALL | {"model.safetensors": b"newer"})
    assert fetch()[0] == begun
    (resolve_model(begun) / "model.safetensors").unlink()
    del repository.commits[begun.partition("@")[2]]
    assert fetch()[0] == f"{NAME}@{newer}"


def test_parts_that_a_killed_process_left_are_removed(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, SMALL)
    blobs = tmp_path / "home" / "hub" / "models--acme--tiny" / "blobs"
    blobs.mkdir(parents=True)
    old, new = blobs / "a.1.incomplete", blobs / "a.2.incomplete"
    for part in (old, new):
        part.write_bytes(b"a part")
    os.utime(old, (0, 0))
    fetch(weights=False)
    assert new.exists()
    assert not old.exists()


def test_an_incomplete_cache_is_completed(hub: Hub) -> None:
    hub.add(NAME, SMALL | SINGLE)
    pinned, _ = fetch()
    (resolve_model(pinned) / "tokenizer.json").unlink()
    hub.requests.clear()
    fetch(tokenizer=False)
    assert hub.requests == []
    fetch(weights=False)
    assert (resolve_model(pinned) / "tokenizer.json").is_file()


def test_offline_the_cache_is_enough_or_the_error_says_what_to_do(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.add(NAME, SMALL | SINGLE)
    fetch(weights=False)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pinned, lines = fetch(weights=False)
    assert (pinned, lines) == (f"{NAME}@{repository.refs['main']}", [])
    message = refusal()
    assert "HF_HUB_OFFLINE is set; unset it, copy the files there" in message
    assert "HF_HUB_OFFLINE" in refusal("acme/unknown", weights=False)
    assert hub.requests == []


def test_without_the_hub_the_error_says_what_to_check(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    message = refusal()
    assert f"{NAME} cannot be downloaded from http://127.0.0.1:9" in message
    assert "check the network and HF_ENDPOINT" in message


def test_unknown_models_and_revisions_are_named(hub: Hub) -> None:
    hub.add(NAME, SMALL | SINGLE)
    assert refusal("acme/unknown").startswith(
        "there is no folder acme/unknown with a config.json, and no model of this name at "
        f"{hub.url}, or it is private and HF_TOKEN is not set; check"
    )
    assert refusal(f"{NAME}@v9").startswith(f"{NAME} has no revision 'v9' at {hub.url}; give")


def test_a_private_model_needs_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, SMALL | SINGLE).token = "hf_right"
    assert "HF_TOKEN is not set" in refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the account of HF_TOKEN has no access" in refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert fetch()[0].startswith(NAME)


def test_a_refused_token_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, SMALL | SINGLE)
    hub.refused_token = "hf_old"
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    assert (
        refusal() == f"{hub.url} refuses the token in HF_TOKEN (401); set a valid one, or unset it"
    )


@pytest.mark.parametrize("token", [None, "hf_other"])
def test_a_gated_model_says_where_to_ask(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.add(NAME, SMALL | SINGLE).gated = True
    assert f"{NAME} is gated: ask for access at {hub.url}/{NAME}, and set HF_TOKEN" in refusal()


@pytest.mark.parametrize("status", [403, 500])
def test_other_answers_are_named(hub: Hub, status: int) -> None:
    hub.status = status
    assert str(status) in refusal()


def test_models_without_safetensors_are_refused(hub: Hub) -> None:
    hub.add(NAME, SMALL | UNREAD)
    message = refusal()
    assert "has neither model.safetensors nor model.safetensors.index.json" in message
    assert "model-q4.gguf" in message
    missing, *_ = SHARDS
    hub.add("acme/torn", SMALL | INDEX | {n: d for n, d in SHARDS.items() if n != missing})
    assert f"{missing} is missing" in refusal("acme/torn")
    hub.add("acme/bad", SMALL | {"model.safetensors.index.json": b"[]"})
    assert "is not an index" in refusal("acme/bad")


def test_a_repository_without_a_configuration_is_refused(hub: Hub) -> None:
    hub.add(NAME, {"tokenizer.json": b"{}"})
    assert "has no config.json" in refusal(weights=False)


def test_a_cache_that_cannot_be_written_is_named(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add(NAME, SMALL)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    message = refusal(weights=False)
    assert "cannot be stored in" in message
    assert "set HF_HOME" in message


def test_local_models_need_no_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model in ("embedded", str(tmp_path), "/no/such/folder", "./no/such", "name-alone"):
        assert fetch(model) == (model, [])
    assert hub.requests == []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("acme/tiny", "acme/tiny"),
        ("acme/tiny@v1", "acme/tiny"),
        ("acme/tiny@refs/pr/3", "acme/tiny"),
        ("/models/acme/tiny", "tiny"),
        ("embedded", "pagewire-chat"),
    ],
)
def test_names_in_requests(model: str, name: str) -> None:
    assert served_name(model, None) == name
    assert served_name(model, "given") == "given"


@pytest.mark.parametrize("model", ["acme/tiny@", "acme/tiny@../../x", "acme/tiny@a b", "a/b/c"])
def test_what_is_no_id_is_no_path_in_the_cache_either(hub: Hub, model: str) -> None:
    assert fetch(model) == (model, [])
    with pytest.raises(FileNotFoundError, match="org/name@revision"):
        resolve_model(model)


@pytest.mark.parametrize(
    ("file", "given", "message"),
    [
        ("adapter_config.json", "", "has an adapter without its model; merge it"),
        ("model-q4.gguf", "", "GGUF files are not supported; give the folder"),
        ("model-q4.gguf", "model-q4.gguf", "GGUF files are not supported; give the folder"),
    ],
)
def test_a_folder_of_another_format_is_named(
    file: str, given: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / file).touch()
    with pytest.raises(FileNotFoundError, match=message):
        resolve_model(str(tmp_path / given))


def test_a_folder_hides_the_id_of_the_same_name(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.repositories[NAME] = Repository()
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / NAME / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert fetch() == (NAME, [])
    assert served_name(NAME, None) == "tiny"


def test_a_tokenizer_may_come_from_another_model(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, SMALL | SINGLE)
    hub.add("acme/words", SMALL | SINGLE)
    files = with_model_files({"model": NAME, "tokenizer": "acme/words", "load_format": "dummy"})
    assert resolve_tokenizer(NAME, files["tokenizer"]) == resolve_model("acme/words")
    assert resolve_tokenizer(files["model"], None) == resolve_model(NAME)
    with_model_files({"model": NAME, "backend": "command"})
    assert "model.safetensors" not in hub.downloaded()
    local = {"model": NAME, "tokenizer": str(tmp_path)}
    assert with_model_files(local, weights=False)["tokenizer"] == str(tmp_path)
    assert resolve_tokenizer(NAME, str(tmp_path)) == tmp_path


def test_a_chat_template_is_read_before_a_download(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, SMALL | SINGLE)
    values = {"model": NAME, "chat_template": str(tmp_path)}
    with pytest.raises(CommandError, match=rf"--chat-template {tmp_path} cannot be read: Is a dir"):
        with_model_files(values)
    file = tmp_path / "chat.jinja"
    file.write_bytes(b"\xff")
    values["chat_template"] = str(file)
    with pytest.raises(CommandError, match="cannot be read: it is not text in UTF-8; give a file"):
        with_model_files(values)
    assert hub.downloaded() == set()
    file.write_text("{{ messages }}")
    with_model_files(values)
    with_model_files({**values, "chat_template": "/absent", "skip_tokenizer": True})
