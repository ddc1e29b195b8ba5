"""Chooses the number of CPU threads of each step."""

import torch

# Multiply-adds of a step, about 20 ms on one core. In shorter steps each operation takes
# microseconds, and a second thread costs as much as it saves. On a busy machine it costs
# milliseconds, because it waits for a core.
MIN_PARALLEL_WORK = 500_000_000
# Up to this many rows, a step is bound by reading the weights.
BANDWIDTH_ROWS = 12


class CpuThreads:
    """Sets torch's number of threads for each step, on the calling thread."""

    def __init__(self, max_threads: int, parameters: int) -> None:
        """`parameters` is the number of weights of the model."""
        self._max_threads = max_threads
        self._parameters = parameters

    def adapt(self, tokens: int) -> None:
        """Call it before a step of `tokens` tokens: long steps get all threads, short ones one."""
        work = self._parameters * max(tokens, BANDWIDTH_ROWS)
        threads = self._max_threads if work >= MIN_PARALLEL_WORK else 1
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
