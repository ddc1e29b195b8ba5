"""Kernels that Triton compiles or loads: once serving has begun there should be none."""

from collections.abc import Callable
from typing import Any

from triton import knobs


def on_compilation(report: Callable[[str], None]) -> None:
    """From now on calls `report` with the name of each kernel variant that was not ready."""

    def hook(*_: Any, fn: Any, **__: Any) -> None:
        report(fn.name)

    knobs.runtime.jit_post_compile_hook = hook
