"""How many CPU threads a step is worth."""

import torch

# Multiply-adds, about 20 ms on one core. In a shorter step each op takes microseconds: waking a
# second thread for it costs as much as it saves, and on a busy machine waiting for one that is
# not running costs milliseconds.
WORTH_THREADS = 500_000_000
# Rows up to which a step takes the time to read the weights, whatever it multiplies them with.
BANDWIDTH_ROWS = 12


class CpuThreads:
    """Sets the calling thread's number of torch threads for each step."""

    def __init__(self, most: int, parameters: int) -> None:
        """At most `most` threads, for a model of `parameters` weights."""
        self._most = most
        self._parameters = parameters

    def adapt(self, tokens: int) -> None:
        """Before a step of `tokens` tokens: all threads if it is long, one otherwise."""
        work = self._parameters * max(tokens, BANDWIDTH_ROWS)
        threads = self._most if work >= WORTH_THREADS else 1
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
