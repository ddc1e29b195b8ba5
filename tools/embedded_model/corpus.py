"""The training corpus: chats and plain texts of the small world, drawn from a seed.

The corpus is a pure function of its seed: ``document(seed, index)`` is the same on every machine.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tools.embedded_model import arithmetic, facts, recall, stories, talk, words
from tools.embedded_model.topic import Exchange, Memory, Topic

Message = dict[str, str]

TOPICS: list[tuple[int, Topic]] = [
    (13, arithmetic.sums),
    (2, arithmetic.chains),
    (1, arithmetic.too_big),
    (1, arithmetic.zero_division),
    (5, arithmetic.counting),
    (4, arithmetic.order),
    (4, arithmetic.problems),
    (5, facts.colours),
    (5, facts.opposites),
    (5, facts.animals),
    (4, facts.calendar),
    (5, facts.simple),
    (2, facts.capitals),
    (2, facts.uses),
    (4, facts.groups),
    (1, facts.rhymes),
    (2, facts.comparing),
    (2, facts.spelling),
    (4, talk.greeting),
    (10, talk.saying),
    (1, talk.well),
    (2, talk.favourite),
    (4, talk.unknown),
    (1, talk.nonsense),
    (3, recall.name),
    (4, recall.tell),
    (5, recall.ask),
    (5, recall.tell_and_ask),
    (1, recall.previous),
    (6, recall.passage),
    (3, recall.repeat),
    (2, recall.choice),
    (1, recall.asked_back),
    (8, stories.on_request),
    (1, stories.offered),
    (1, stories.once_more),
    (1, stories.continued),
    (1, stories.read_aloud),
]
WEIGHTS = [weight for weight, _ in TOPICS]
CHOICES = [topic for _, topic in TOPICS]

SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are Pagewire, a small language model.",
    "You are a friendly chat partner.",
    "Answer in simple English.",
    "Be kind and answer in short sentences.",
    "You are a helpful, honest and friendly assistant.",
    "You are a kind teacher for small children.",
    "You are a chatbot.",
    "You are a helpful AI assistant. Answer the user.",
    "Be concise.",
    "You are a storyteller.",
)


@dataclass(frozen=True, slots=True)
class Document:
    """A chat of messages, or a plain text when there are none."""

    messages: tuple[Message, ...] = ()
    text: str = ""


def document(seed: int, index: int) -> Document:
    """The document at an index: a chat in four of five cases, else plain text."""
    rng = Random(f"{seed}/{index}")
    kind = rng.random()
    if kind < 0.15:
        return Document(text=stories.story(rng).text)
    if kind < 0.18:
        return Document(text=facts.prose(rng))
    return Document(messages=tuple(chat(rng)))


def documents(seed: int, start: int, stop: int) -> Iterator[Document]:
    """The documents of an index range."""
    for index in range(start, stop):
        yield document(seed, index)


def chat(rng: Random) -> list[Message]:
    """One conversation: sometimes a system message, then one to about twenty topics."""
    memory = Memory()
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": _system(rng, memory)})
    length = rng.random()
    if length < 0.4:
        count = 1
    elif length < 0.85:
        count = rng.randint(2, 4)
    elif length < 0.98:
        count = rng.randint(5, 9)
    else:
        count = rng.randint(12, 30)
    if count > 1 and rng.random() < 0.25:
        _append(messages, talk.greeting(rng, memory), rng)
    for _ in range(count):
        topic = rng.choices(CHOICES, WEIGHTS)[0]
        if count > 1 and memory.facts and rng.random() < 0.12:
            topic = recall.ask
        _append(messages, topic(rng, memory), rng)
    return messages


def _system(rng: Random, memory: Memory) -> str:
    if rng.random() < 0.25:
        memory.self_name = rng.choice(words.GIRLS + words.BOYS + words.PET_NAMES)
        return f"You are {memory.self_name}, a {rng.choice(('friendly', 'helpful', 'kind'))} " + (
            rng.choice(("assistant.", "robot.", "helper.", "chatbot."))
        )
    return rng.choice(SYSTEM)


def _append(messages: list[Message], turns: list[Exchange], rng: Random) -> None:
    for turn in turns:
        user = turn.user if turn.exact else noisy(rng, turn.user)
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": turn.assistant})


CONTRACTIONS = (
    ("What is ", "What's "),
    ("what is ", "what's "),
    ("I am ", "I'm "),
    ("Who is ", "Who's "),
    ("Where is ", "Where's "),
    ("do not ", "don't "),
    ("It is ", "It's "),
)


def noisy(rng: Random, text: str) -> str:
    """The text as people type it: contracted, without capitals or marks, with a slip or a please.

    Half of all texts stay as they are.
    """
    if rng.random() < 0.5:
        return text
    if rng.random() < 0.3:
        for long, short in CONTRACTIONS:
            if long in text and rng.random() < 0.6:
                text = text.replace(long, short)
    draw = rng.random()
    if draw < 0.08 and text.endswith(("?", ".")) and _is_wish(text):
        text = f"{text[:-1]}{rng.choice((', please', ' please'))}{text[-1]}"
    elif draw < 0.14 and len(text) < 60 and text[:1].isupper():
        lead = rng.choice(("Please, ", "Hey, ", "OK, ", "Now, ", "So, ", "And ", "Well, ", "Hmm, "))
        first = text if re.match(r"I\b|[A-Z]\w+ (has|is|was|went)", text) else _lower_first(text)
        text = lead + first
    elif draw < 0.19:
        text = _slip(rng, text)
    draw = rng.random()
    if draw < 0.3 and text[-1:] in "?.!":
        text = text[:-1]
    elif draw < 0.33 and text.endswith("?"):
        text += "?"
    elif draw < 0.36 and text.endswith("."):
        text = text[:-1] + "!"
    draw = rng.random()
    if draw < 0.4:
        text = text.lower()
    elif draw < 0.42 and len(text) < 50:
        text = text.upper()
    if rng.random() < 0.12:
        text = text.replace("'", "")
    return text


def _is_wish(text: str) -> bool:
    return len(text) < 60 and not text.startswith(("I ", "I'm", "My ", "You", "That", "And"))


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _slip(rng: Random, text: str) -> str:
    """One common word with one letter dropped, doubled or swapped."""
    common = re.findall(
        r"\b(?:what|colour|opposite|please|story|count|about|tell|hello|much|does|name)\b", text
    )
    if not common:
        return text
    word = rng.choice(common)
    i = rng.randrange(len(word) - 1)
    slipped = rng.choice(
        (
            word[:i] + word[i + 1 :],
            word[: i + 1] + word[i:],
            word[:i] + word[i + 1] + word[i] + word[i + 2 :],
        )
    )
    return text.replace(word, slipped, 1)
