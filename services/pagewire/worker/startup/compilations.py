"""Hooks on what Triton compiles or loads: once serving has begun there should be none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from pagewire.worker.startup.compile_pool import Job


def on_compilation(report: Callable[[str], None]) -> None:
    """From now on calls `report` with the name of each kernel variant that was not ready."""

    def hook(*_: Any, fn: Any, **__: Any) -> None:
        report(fn.name)

    knobs.runtime.jit_post_compile_hook = hook


@contextmanager
def collected(submit: Callable[[Job], None]) -> Iterator[None]:
    """Inside, no kernel is launched: what it would have written stays as it was.

    Each variant that this process has not loaded goes to `submit`, once. Those that it has are not
    launched either: they would read addresses and ids that nobody has written.
    """
    # Asking a hook costs Triton six times what a launch does: it is to be asked once a variant.
    pretended: list[tuple[dict[str, Any], str]] = []

    def hook(*_: Any, key: str, fn: Any, **details: Any) -> bool:
        target = driver.active.get_current_target()
        described = target.backend, target.arch, target.warp_size
        submit(Job(described, fn.module, fn.name, details["compile"]["specialization_data"]))
        loaded = fn.jit_function.device_caches[details["compile"]["device"]][0]
        loaded[key] = object()
        pretended.append((loaded, key))
        return True  # do not compile, do not launch

    launch = JITFunction.run

    def look_up(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    knobs.runtime.jit_cache_hook = hook
    JITFunction.run = look_up
    try:
        yield
    finally:
        JITFunction.run = launch
        knobs.runtime.jit_cache_hook = None
        for loaded, key in pretended:
            del loaded[key]


@contextmanager
def compiled_here() -> Iterator[list[str]]:
    """Inside, collects the names of kernels that were compiled, as they were not in the cache."""
    names: list[str] = []

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            names.append(src.name)

    knobs.compilation.listener = listener
    try:
        yield names
    finally:
        knobs.compilation.listener = None
