"""The speculation metric of workers and schedulers: drafts by drafter and outcome."""

import numpy as np
from prometheus_client import Counter

from pagewire.packing import Int32Array
from pagewire.v1 import worker_pb2 as pb

LABELS = ("drafter", "outcome")
MEANING = "Tokens that speculation drafted, by drafter and by whether they were right."
# By their numbers in worker.proto, as the metric's label.
DRAFTERS = {
    number: name.removeprefix("DRAFTER_").lower()
    for name, number in pb.Drafter.items()
    if number != pb.DRAFTER_UNSPECIFIED
}


class DraftCounter:
    """Counts accepted and rejected drafts."""

    def __init__(self, counter: Counter) -> None:
        """`counter` has the labels `LABELS`."""
        self._by_drafter = {
            number: (counter.labels(name, "accepted"), counter.labels(name, "rejected"))
            for number, name in DRAFTERS.items()
        }

    def count(self, drafters: Int32Array, drafted: Int32Array, accepted: Int32Array) -> None:
        """Counts rows `[n]` with drafts: the drafter, drafts and accepted drafts of each.

        The drafters must be those of worker.proto.
        """
        made = np.bincount(drafters, weights=drafted)
        right = np.bincount(drafters, weights=accepted)
        for number in made.nonzero()[0].tolist():
            good, bad = self._by_drafter[number]
            good.inc(int(right[number]))
            bad.inc(int(made[number] - right[number]))

    def value(self, drafter: str, outcome: str) -> int:
        """The count of a drafter and an outcome."""
        number = next(n for n, name in DRAFTERS.items() if name == drafter)
        pair = self._by_drafter[number]
        return int(pair[outcome == "rejected"]._value.get())
