"""Which of several schedulers gets a generation."""

import math
import random
from collections.abc import Iterable

from pagewire.gateway.affinity import by_preference
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.routing.link import Link

# A scheduler gets the prompts that prefer it until it has this many times its share of all
# requests.
MAX_SHARE = 1.25


def select(links: Iterable[Link], generation: Generation) -> Link | None:
    """The scheduler that a generation is sent to; None if none accepts it.

    Consistent hashing with bounded loads: the scheduler that the prompt's head prefers most, unless
    it already has more than MAX_SHARE of what its workers should have. A prompt without a head
    goes to the least loaded scheduler.
    """
    accepting = {link.target: link for link in links if link.accepts(generation)}
    if len(accepting) > 1 and (head := generation.common.head):
        num_requests = 1 + sum(link.num_requests for link in accepting.values())
        num_workers = sum(link.load.ready_workers for link in accepting.values())
        for target in by_preference(head, list(accepting)):
            link = accepting[target]
            share = num_requests * link.load.ready_workers / num_workers
            if link.num_requests < math.ceil(MAX_SHARE * share):
                return link
    return least_loaded(accepting.values())


def least_loaded(links: Iterable[Link]) -> Link | None:
    """The link under the least pressure, a random one among equals; None without links."""
    return min(links, key=lambda link: (link.pressure, random.random()), default=None)
