"""Which of several schedulers gets a generation."""

import math
import random
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from pagewire.gateway.affinity import by_preference
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.routing.link import Link

# A scheduler gets the prompts that prefer it until it has this many times its share of all
# requests.
MAX_SHARE = 1.25


class Choice(Protocol):
    """A scheduler that may be chosen."""

    @property
    def target(self) -> str:
        """Its address."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests open there."""
        ...

    @property
    def num_workers(self) -> int:
        """Workers ready there."""
        ...

    @property
    def pressure(self) -> float:
        """Requests per worker."""
        ...


C = TypeVar("C", bound=Choice)


def select(links: Iterable[Link], generation: Generation) -> Link | None:
    """The scheduler that a generation is sent to; None if none accepts it."""
    accepting = [link for link in links if link.accepts(generation)]
    return choose(accepting, generation.common.head)


def choose(accepting: Sequence[C], head: bytes) -> C | None:
    """The scheduler for a prompt with this head; None if `accepting` is empty.

    Consistent hashing with bounded loads: the scheduler that the prompt's head prefers most, unless
    it already has more than MAX_SHARE times the share of its workers. A prompt without a head goes
    to the least loaded scheduler.
    """
    if len(accepting) > 1 and head:
        by_target = {each.target: each for each in accepting}
        num_requests = 1 + sum(each.num_requests for each in accepting)
        num_workers = sum(each.num_workers for each in accepting)
        for target in by_preference(head, list(by_target)):
            chosen = by_target[target]
            share = num_requests * chosen.num_workers / num_workers
            if chosen.num_requests < math.ceil(MAX_SHARE * share):
                return chosen
    return least_loaded(accepting)


def least_loaded(choices: Iterable[C]) -> C | None:
    """The scheduler under the least pressure, a random one among equals; None without any."""
    return min(choices, key=lambda each: (each.pressure, random.random()), default=None)
