"""Where a model keeps its chat templates: every place, as transformers reads it."""

import json
import shutil
from pathlib import Path

import pytest

from pagewire.scheduler.text.template_files import load_chat_template
from support.models.tokenizer_folders import byte_level_folder

SYSTEM = {"role": "system", "content": "Be brief."}
BOS = {"__type": "AddedToken", "content": "<|start|>"}
CHAT = [SYSTEM, {"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A model folder with a tokenizer and no template."""
    shutil.copytree(made, tmp_path / "model")
    write(tmp_path / "model", "tokenizer_config.json", {"bos_token": BOS})
    return tmp_path / "model"


def write(folder: Path, name: str, content: object) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def in_config(folder: Path, template: object) -> None:
    config = {"bos_token": BOS, "chat_template": template}
    write(folder, "tokenizer_config.json", config)


def rendered(folder: Path, **arguments: object) -> str:
    template = load_chat_template(folder)
    assert template is not None
    return template.render(CHAT, True, {}, **arguments)  # type: ignore[arg-type]


def rendered_by_transformers(folder: Path, **arguments: object) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True, **arguments
    )


def test_a_model_may_have_none(folder: Path) -> None:
    assert load_chat_template(folder) is None


@pytest.mark.parametrize("given", [5, [{"name": "default"}], ["a"], {"default": None}])
def test_a_template_that_is_no_text_is_named(folder: Path, given: object) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": given})
    with pytest.raises(ValueError, match=r"chat_template must be a text.* --chat-template"):
        load_chat_template(folder)


def test_every_place_is_read_as_transformers_reads_it(folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]

    def check(plain: str, with_tools: str) -> None:
        assert rendered(folder) == rendered_by_transformers(folder) == plain
        assert rendered(folder, tools=tools) == with_tools
        assert rendered_by_transformers(folder, tools=tools) == with_tools

    in_config(folder, "{{ bos_token }}config {{ messages | length }}")
    check("<|start|>config 2", "<|start|>config 2")
    in_config(
        folder,
        [
            {"name": "default", "template": "default of several"},
            {"name": "tool_use", "template": "tools of several"},
        ],
    )
    check("default of several", "tools of several")
    write(folder, "chat_template.jinja", "{{ bos_token }}file")
    check("<|start|>file", "<|start|>file")
    write(folder, "additional_chat_templates/tool_use.jinja", "file for {{ tools[0].type }}")
    check("<|start|>file", "file for function")


def test_the_template_of_a_processor_is_the_last(folder: Path) -> None:
    write(folder, "chat_template.json", {"chat_template": "processor"})
    assert rendered(folder) == "processor"
    in_config(folder, "config")
    assert rendered(folder) == "config"


def test_special_tokens_may_have_a_file_of_their_own(folder: Path) -> None:
    tokens = {"bos_token": "<unused>", "eos_token": "<|end|>", "additional_special_tokens": ["x"]}
    write(folder, "special_tokens_map.json", tokens)
    write(folder, "chat_template.jinja", "{{ bos_token }}{{ eos_token }}")
    assert rendered(folder) == "<|start|><|end|>"


def test_a_given_file_is_used_instead(folder: Path, tmp_path: Path) -> None:
    in_config(folder, "the model's")
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}mine")
    template = load_chat_template(folder, file)
    assert template is not None
    assert template.render(CHAT, True, {}) == "<|start|>mine"
    with pytest.raises(ValueError, match=r"--chat-template .*absent.jinja cannot be read"):
        load_chat_template(folder, tmp_path / "absent.jinja")
    file.write_text("{% if %}")
    with pytest.raises(ValueError, match="does not parse"):
        load_chat_template(folder, file)
