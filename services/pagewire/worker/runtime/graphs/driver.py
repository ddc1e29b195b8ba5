"""Direct calls of the driver: copies and graphs on the stream of steps, and captures.

A copy by torch looks up streams, records events for its allocator and releases the interpreter
lock. Getting the lock back may take as long as another thread's turn. These calls take a few
microseconds and keep the lock. Torch cannot copy a captured graph, nor continue it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

from pagewire.worker.errors import SetupError
from pagewire.worker.ops.device import step_stream

_OUT = POINTER(c_void_p)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuMemcpyHtoDAsync_v2": (c_size_t, c_size_t, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_size_t, c_size_t, c_size_t, c_void_p),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphClone": (_OUT, c_void_p),
    "cuGraphNodeFindInClone": (_OUT, c_void_p, c_void_p),
    "cuGraphInstantiateWithFlags": (_OUT, c_void_p, c_uint64),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuStreamGetCaptureInfo_v2": (
        c_void_p,
        POINTER(c_int),
        POINTER(c_uint64),
        _OUT,
        POINTER(_OUT),
        POINTER(c_size_t),
    ),
    "cuStreamBeginCaptureToGraph": (c_void_p, c_void_p, _OUT, c_void_p, c_size_t, c_int),
    "cuStreamUpdateCaptureDependencies": (c_void_p, _OUT, c_size_t, c_int),
    "cuStreamEndCapture": (c_void_p, _OUT),
}
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_SET = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


def copy_to_device(to: int, source: int, size: int) -> None:
    """Queues a copy of `size` bytes from pinned memory at the address `source`."""
    driver, stream = _driver()
    _check(driver.cuMemcpyHtoDAsync_v2(to, source, size, stream))


def copy_to_host(to: int, source: int, size: int) -> None:
    """Queues a copy of `size` bytes to pinned memory at the address `to`."""
    driver, stream = _driver()
    _check(driver.cuMemcpyDtoHAsync_v2(to, source, size, stream))


def launch(executable: int) -> None:
    """Queues a graph."""
    driver, stream = _driver()
    _check(driver.cuGraphLaunch(executable, stream))


def last_nodes(stream: int) -> list[int]:
    """The nodes that the next work on a stream depends on; the stream is being captured."""
    status, number, graph = c_int(), c_uint64(), c_void_p()
    nodes, count = _OUT(), c_size_t()
    found = (byref(status), byref(number), byref(graph), byref(nodes), byref(count))
    _check(_driver()[0].cuStreamGetCaptureInfo_v2(stream, *found))
    return [int(nodes[place] or 0) for place in range(count.value)]


def copied_graph(graph: int) -> int:
    """A copy of a graph, for `destroy_graph`."""
    return _made("cuGraphClone", graph)


def copied_nodes(nodes: Sequence[int], graph: int) -> list[int]:
    """The nodes of a copied graph that are the copies of `nodes`."""
    return [_made("cuGraphNodeFindInClone", node, graph) for node in nodes]


@contextmanager
def capturing(stream: int, graph: int, after: Sequence[int]) -> Iterator[None]:
    """Adds the work that is queued on a stream inside to a graph, after some of its nodes."""
    driver, _ = _driver()
    first, count = _handles(after), len(after)
    _check(driver.cuStreamBeginCaptureToGraph(stream, graph, first, None, count, _THREAD_LOCAL))
    try:
        yield
    finally:
        status = driver.cuStreamEndCapture(stream, byref(c_void_p()))
    _check(status)


def continue_after(stream: int, nodes: Sequence[int]) -> None:
    """Lets the next work that is captured on a stream depend on these nodes only."""
    _check(
        _driver()[0].cuStreamUpdateCaptureDependencies(stream, _handles(nodes), len(nodes), _SET)
    )


def executable(graph: int) -> int:
    """A form of a graph for `launch`; `destroy_executable` frees it."""
    return _made("cuGraphInstantiateWithFlags", graph, 0)


def destroy_graph(graph: int) -> None:
    """Frees a graph."""
    _driver()[0].cuGraphDestroy(graph)


def destroy_executable(executable: int) -> None:
    """Frees what `executable` returned."""
    _driver()[0].cuGraphExecDestroy(executable)


def _made(call: str, *arguments: int) -> int:
    """The handle that a call writes to its first argument."""
    made = c_void_p()
    _check(getattr(_driver()[0], call)(byref(made), *arguments))
    assert made.value is not None
    return made.value


def _handles(nodes: Sequence[int]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(nodes))(*nodes)


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA error: a call of the driver failed: CUresult {status}")


@cache
def _driver() -> tuple[ctypes.PyDLL, int]:
    """The driver, and the stream of steps; SetupError if the driver is too old."""
    driver = ctypes.PyDLL("libcuda.so.1")
    for name, arguments in _ARGUMENTS.items():
        try:
            getattr(driver, name).argtypes = arguments
        except AttributeError as error:
            raise SetupError(
                f"the NVIDIA driver has no {name}: install one for CUDA 12.3 or newer"
            ) from error
    return driver, step_stream().cuda_stream
