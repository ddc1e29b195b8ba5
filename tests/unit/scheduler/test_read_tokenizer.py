"""What a scheduler's settings make of a model's text files."""

from pathlib import Path

from pagewire.config import SchedulerConfig
from pagewire.scheduler.requests.text_helper import read_tokenizer


def test_the_chat_template_of_the_settings_is_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{{ messages[0].content }}")
    given = read_tokenizer(SchedulerConfig(chat_template=str(file))).chat_template
    own = read_tokenizer(SchedulerConfig()).chat_template
    assert given is not None
    assert own is not None
    chat = [{"role": "user", "content": "hi"}]
    assert given.render(chat, True, {}).endswith("hi")
    assert own.render(chat, True, {}) != given.render(chat, True, {})
