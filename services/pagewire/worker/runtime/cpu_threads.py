"""Chooses the number of CPU threads of each step."""

import torch

# Multiply-adds of a step, about 20 ms on one core. In shorter steps each operation takes
# microseconds. Then a second thread costs as much as it saves. On a busy machine it costs
# milliseconds, because it has to wait for a core.
MIN_PARALLEL_WORK = 500_000_000
# Up to this many rows, the time of a step is that of reading the weights.
BANDWIDTH_ROWS = 12


class CpuThreads:
    """Sets torch's number of threads for each step, on the calling thread."""

    def __init__(self, max_threads: int, parameters: int) -> None:
        """`parameters` is the number of weights of the model."""
        self._max_threads = max_threads
        self._parameters = parameters

    def adapt(self, tokens: int) -> None:
        """Call before a step of `tokens` tokens: a long step gets all threads, a short one one."""
        work = self._parameters * max(tokens, BANDWIDTH_ROWS)
        threads = self._max_threads if work >= MIN_PARALLEL_WORK else 1
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
