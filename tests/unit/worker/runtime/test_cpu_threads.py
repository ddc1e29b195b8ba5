"""Number of threads by the length of a step, on the calling thread."""

from collections.abc import Iterator

import pytest
import torch

from pagewire.worker.runtime.cpu_threads import CpuThreads


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("parameters", "tokens", "threads"),
    [
        (7_000_000, 1, 1),
        (7_000_000, 16, 1),
        (7_000_000, 200, 2),  # a prompt
        (600_000_000, 1, 2),  # reading the weights takes long enough
    ],
)
def test_long_steps_take_all_threads(parameters: int, tokens: int, threads: int) -> None:
    CpuThreads(2, parameters).adapt(tokens)
    assert torch.get_num_threads() == threads


def test_one_thread_stays_one() -> None:
    CpuThreads(1, 10**9).adapt(10**4)
    assert torch.get_num_threads() == 1
