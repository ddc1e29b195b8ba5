"""Hooks into Triton: which kernel variants a process looks up, loads or compiles."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from pagewire.worker.startup.compile_pool import CompileJob


def on_compilation(report: Callable[[str], None]) -> None:
    """Calls `report` with the name of each kernel variant that Triton compiles from now on."""

    def hook(*_: Any, fn: Any, **__: Any) -> None:
        report(fn.name)

    knobs.runtime.jit_post_compile_hook = hook


@contextmanager
def collecting_kernels(submit: Callable[[CompileJob], None]) -> Iterator[None]:
    """Inside, no Triton kernel is launched, and none writes its output.

    Each variant that this process has not loaded goes to `submit`, once. Loaded variants are not
    launched either: they would read memory that no kernel has written.
    """
    # Calling the hook costs six times a launch, so each variant is marked as loaded after the
    # first call. These marks are removed at the end.
    pretended: list[tuple[dict[str, Any], str]] = []

    def hook(*_: Any, key: str, fn: Any, **details: Any) -> bool:
        target = driver.active.get_current_target()
        described = target.backend, target.arch, target.warp_size
        submit(CompileJob(described, fn.module, fn.name, details["compile"]["specialization_data"]))
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
def recording_compilations() -> Iterator[list[str]]:
    """Inside, records the names of kernels that Triton compiled because its cache had none."""
    names: list[str] = []

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            names.append(src.name)

    knobs.compilation.listener = listener
    try:
        yield names
    finally:
        knobs.compilation.listener = None
