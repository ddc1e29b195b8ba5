"""Conversations whose last message the model continues."""

import pytest

from pagewire.errors import RequestError
from pagewire.scheduler.text.chat_template import ChatTemplate
from pagewire.scheduler.text.final_message import render_open_ended

KEEPS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}"
HIDES = "{% for m in messages %}<{{ m.role }}>{% endfor %}"
UPPER = "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}"


def rendered(template: str, *contents: str) -> str:
    parsed = ChatTemplate(template, {})
    messages = [{"role": "user", "content": content} for content in contents]
    return render_open_ended(lambda tagged: parsed.render(tagged, False, {}), messages)


@pytest.mark.parametrize(
    ("template", "contents", "text"),
    [
        (KEEPS, ("hi", "The fox"), "<user>hi<end>\n<user>The fox"),
        (KEEPS, ("a", " a \n"), "<user>a<end>\n<user> a \n"),
        (TRIMS, ("hi ", " The fox  "), "<user>hi<end>\n<user>The fox"),
        (KEEPS, ("same", "same"), "<user>same<end>\n<user>same"),
        (KEEPS, ("[the last message ends here] x",), "<user>[the last message ends here] x"),
    ],
)
def test_the_text_ends_with_the_last_message(
    template: str, contents: tuple[str, ...], text: str
) -> None:
    assert rendered(template, *contents) == text


@pytest.mark.parametrize("template", [HIDES, UPPER])
def test_a_template_that_changes_the_message_is_refused(template: str) -> None:
    with pytest.raises(RequestError, match="changes the text of the last message") as refused:
        rendered(template, "hi")
    assert refused.value.field == "continue_final_message"


def test_a_message_without_text_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match="needs text in the last message"):
        rendered(KEEPS, "hi", " ")
