"""The parts of a conversation: an exchange of two turns, and the memory of a chat."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tools.embedded_model import words


@dataclass(frozen=True, slots=True)
class Exchange:
    """One user turn and the answer to it. ``exact``: the user's text gets no noise."""

    user: str
    assistant: str
    exact: bool = False


@dataclass(slots=True)
class Memory:
    """The facts of this chat so far, as questions that can still be asked.

    ``facts`` maps a key ("name", "pet") to the questions about it and their one answer.
    """

    self_name: str = "Pagewire"
    user_name: str = ""
    facts: dict[str, tuple[list[str], str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


Topic = Callable[[Random, Memory], list[Exchange]]


def invented(rng: Random) -> str:
    """A made-up word, so that the model copies unseen words instead of replacing them."""
    return "".join(rng.choice(words.SYLLABLES) for _ in range(rng.randint(2, 3)))


def person(rng: Random) -> tuple[str, list[str]]:
    """A first name and its pronouns (subject, object, possessive)."""
    if rng.random() < 0.5:
        return rng.choice(words.GIRLS), words.FEMALE
    return rng.choice(words.BOYS), words.MALE


def one(rng: Random, *options: str) -> str:
    """One of the options; an option may hold several, divided by a bar."""
    return rng.choice(rng.choice(options).split("|"))
