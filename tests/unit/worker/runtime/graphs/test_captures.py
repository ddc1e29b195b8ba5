"""Captures, without a GPU."""

import gc
import weakref

from pagewire.worker.runtime.graphs.captures import Captures


class Garbage:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_before_captures_and_not_during_them() -> None:
    assert gc.isenabled()
    before = weakref.ref(Garbage())
    with Captures():
        assert before() is None
        during = weakref.ref(Garbage())
        _ = [[] for _ in range(100_000)]  # far more objects than start a collection
        assert during() is not None
    _ = [[] for _ in range(100_000)]
    assert during() is None


def test_collections_stay_off_where_they_were_off() -> None:
    gc.disable()
    try:
        with Captures():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
