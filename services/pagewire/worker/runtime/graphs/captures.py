"""Captures graphs, also several with the same start.

All kinds of decode steps with as many rows have the same layers; they differ in sampling and in the
wait for masks. The host captures the layers of an 8B in 20 ms, and copies a captured graph in 2 ms.
So the same start is captured once.
"""

import gc
import weakref
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pagewire.worker.runtime.graphs import driver

T = TypeVar("T")


class Graph:
    """A graph that can be launched; see `torch.cuda.CUDAGraph`."""

    def __init__(self, executable: int) -> None:
        self._executable = executable
        weakref.finalize(self, driver.destroy_executable, executable).atexit = False

    def replay(self) -> None:
        """Queues the graph on the stream of steps."""
        driver.launch(self._executable)


class Captures:
    """A context in which graphs are captured.

    All graphs of a process share memory: they must run one after another. Python collects no
    garbage inside, because freeing another backend's graphs or memory would end a capture.
    """

    def __init__(self) -> None:
        self._collected = gc.isenabled()

    def __enter__(self) -> "Captures":
        gc.collect()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._collected:
            gc.enable()

    def whole(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """A graph of `run`, and the tensor that it returned."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with _captured_in(graph):
            out = run()
        return Graph(driver.executable(graph.raw_cuda_graph())), out

    def start(self, run: Callable[[Callable[[], None]], T]) -> "CapturedStart[T]":
        """The start of several graphs; see `CapturedStart`."""
        return CapturedStart(run)


class CapturedStart(Generic[T]):
    """The captured start of several graphs, and its `result`."""

    def __init__(self, run: Callable[[Callable[[], None]], T]) -> None:
        """Captures `run(mark)`. It calls `mark` where work beside the rest of it may begin."""
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._marked: list[int] = []
        with _captured_in(self._graph):
            self.result = run(self._mark)
            self._ends = driver.last_nodes(_stream().cuda_stream)

    def continued(
        self, run: Callable[[T], Tensor], beside: Callable[[], None] | None = None
    ) -> tuple[Graph, Tensor]:
        """A graph of the start and then `run(result)`, and the tensor that `run` returned.

        The streams that `beside` forks begin at the mark; `run` must join them.
        """
        graph = driver.copied_graph(self._graph.raw_cuda_graph())
        try:
            ends = driver.copied_nodes(self._ends, graph)
            first = ends if beside is None else driver.copied_nodes(self._marked, graph)
            stream = _stream().cuda_stream
            with (
                torch.cuda.use_mem_pool(_pool()),
                torch.cuda.stream(_stream()),
                driver.capturing(stream, graph, first),
            ):
                if beside is not None:
                    beside()
                    driver.continue_after(stream, ends)
                out = run(self.result)
            return Graph(driver.executable(graph)), out
        finally:
            driver.destroy_graph(graph)

    def _mark(self) -> None:
        self._marked = driver.last_nodes(_stream().cuda_stream)


def _captured_in(graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
    """A context whose work is captured in `graph`."""
    return torch.cuda.graph(graph, pool=_pool().id, stream=_stream())  # type: ignore[arg-type]


@cache
def _pool() -> torch.cuda.MemPool:
    """The memory of all captured graphs."""
    return torch.cuda.MemPool()


@cache
def _stream() -> torch.cuda.Stream:
    """The stream of all captures. The default stream cannot be captured."""
    return torch.cuda.Stream()
