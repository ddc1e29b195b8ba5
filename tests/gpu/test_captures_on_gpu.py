"""Captures of graphs, also several with the same start."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagewire.worker.runtime.graphs.captures import Captures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]

SIZE = 1 << 20


def test_each_graph_runs_the_start_and_its_own_end() -> None:
    given = torch.zeros(SIZE, device="cuda")
    marked = torch.zeros(SIZE, device="cuda")
    aside = torch.zeros(SIZE, device="cuda")
    side = torch.cuda.Stream()

    def begin(mark: Callable[[], None]) -> Tensor:
        marked.copy_(given + 1)
        mark()
        later = marked.clone()
        for _ in range(100):
            later = later + 1
        marked.add_(1000)  # not part of what `beside` may read
        return later

    def beside() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            aside.copy_(given * 2)

    def join(later: Tensor) -> Tensor:
        torch.cuda.current_stream().wait_stream(side)
        return later + aside

    torch.cuda.synchronize()
    start = Captures().start(begin)
    ends: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], None] | None]] = {
        "negative": (lambda later: -later, None),
        "half": (lambda later: later / 2, None),
        "beside": (join, beside),
    }
    graphs = {name: start.continued(*end) for name, end in ends.items()}
    del start
    for value in (3.0, 8.0):
        given.fill_(value)
        later = value + 101
        expected = {"negative": -later, "half": later / 2, "beside": later + 2 * value}
        for name, (graph, out) in graphs.items():
            graph.replay()
            torch.cuda.synchronize()
            assert bool((out == expected[name]).all()), name


@pytest.mark.parametrize("is_marked_first", [True, False])
def test_work_beside_the_start_begins_at_the_mark(is_marked_first: bool) -> None:
    """It has ended before the start has, although nothing waits for it."""
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    seen = torch.zeros(1, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()

    def begin(mark: Callable[[], None]) -> Tensor:
        if is_marked_first:
            mark()
        seen.zero_()
        if not is_marked_first:
            mark()
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
        return torch.ones(1, device="cuda")

    def beside() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            flag.fill_(1)

    def join(ones: Tensor) -> Tensor:
        seen.copy_(flag)
        torch.cuda.current_stream().wait_stream(side)
        return ones + seen

    torch.cuda.synchronize()
    graph, out = Captures().start(begin).continued(join, beside)
    graph.replay()
    torch.cuda.synchronize()
    assert int(out) == 2


def test_a_failure_ends_the_capture() -> None:
    def fails(_: Tensor) -> Tensor:
        raise ValueError("as intended")

    start = Captures().start(lambda mark: torch.ones(4, device="cuda") * 2)
    with pytest.raises(ValueError, match="as intended"):
        start.continued(fails)
    graph, out = start.continued(lambda twos: twos + 1)
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [3.0] * 4
