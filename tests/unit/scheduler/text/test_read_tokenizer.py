"""A scheduler's settings and a model's text files."""

import json
from pathlib import Path

import pytest

from pagewire.config import SchedulerConfig
from pagewire.errors import RequestError
from pagewire.scheduler.requests.prompt import ModelLimits, tokenize_request
from pagewire.scheduler.requests.text_helper import read_tokenizer
from pagewire.scheduler.text.tokenizer import Tokenizer
from pagewire.v1 import inference_pb2 as pb
from support.models.tokenizer_folders import byte_level_folder

CHAT = [{"role": "user", "content": "hi"}]


def test_the_chat_template_of_the_settings_is_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{{ messages[0].content }}")
    given = read_tokenizer(SchedulerConfig(chat_template=str(file))).chat_template
    own = read_tokenizer(SchedulerConfig()).chat_template
    assert given is not None
    assert own is not None
    assert given.render(CHAT, True, {}).endswith("hi")
    assert own.render(CHAT, True, {}) != given.render(CHAT, True, {})


def test_a_tokenizer_may_be_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """The model's configuration still defines the end of a sequence."""
    folder = byte_level_folder(tmp_path / "tokenizer")
    (folder / "config.json").unlink()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"eos_token_id": 77}))
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.3}))
    read = read_tokenizer(SchedulerConfig(model=str(model), tokenizer=str(folder)))
    assert isinstance(read, Tokenizer)
    assert read.encode("The").tolist() == Tokenizer(folder).encode("The").tolist()
    assert read.chat_template is not None
    assert read.chat_template.render(CHAT, False, {}) == "<|start|>user\nhi<|end|>\n"
    assert read.eos_token_ids == (77,)
    assert read.default_sampling.temperature == 0.3
    with pytest.raises(FileNotFoundError, match="--tokenizer"):
        read_tokenizer(SchedulerConfig(model=str(model)))


@pytest.mark.parametrize("setting", ["tokenizer", "chat_template"])
def test_settings_that_contradict_each_other_are_named(setting: str) -> None:
    given = {setting: "embedded"}
    with pytest.raises(ValueError, match=r"and --skip-tokenizer exclude each other"):
        read_tokenizer(SchedulerConfig(skip_tokenizer=True, **given))


def test_the_embedded_model_renders_a_turn_without_content_as_empty() -> None:
    template = read_tokenizer(SchedulerConfig()).chat_template
    assert template is not None
    turns = [{"role": "assistant", "content": None}, {"role": "user", "content": "hi"}]
    text = template.render(turns, False, {})
    assert text == "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"


def test_ids_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level_folder(tmp_path))
    largest = int(tokenizer.encode("Grüße").max())
    message = pb.GenerateRequest(prompt="Grüße")
    tokens = tokenize_request(message, tokenizer, ModelLimits(100, 100, largest + 1))
    assert tokens.prompt.max() == largest
    with pytest.raises(
        RequestError, match=f"the id {largest}, which is outside .* needs the model's own"
    ):
        tokenize_request(message, tokenizer, ModelLimits(100, 100, largest))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} cannot be read"):
        Tokenizer(folder)
