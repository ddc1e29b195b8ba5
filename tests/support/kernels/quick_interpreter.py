"""Triton's interpreter without its repeated work.

Results and errors stay the same. Unchanged, each call of one jitted function by another replaces
all functions of the language again, although the launch has replaced them. Each sum of integers
checks for an overflow, although only `debug` reports it. Each value describes its shape again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import triton
from triton import language
from triton.language import core
from triton.runtime import interpreter

_OPTIONS = interpreter.interpreter_builder.options
_find_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, Any] = {}


def _np_dtype(of: Any) -> Any:
    """The numpy type of a scalar's or a block's elements."""
    element = of.element_ty if isinstance(of, core.block_type) else of
    if element.name not in _np_dtypes:
        _np_dtypes[element.name] = _find_np_dtype(element)
    return _np_dtypes[element.name]


@cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    return [pair for pair in inspect.getmembers(package) if core.is_builtin(pair[1])]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Replaces the functions of a part of the language, for a launch."""
    for name, member in _builtins(package):
        interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _languages(function: Callable[..., Any]) -> list[Any]:
    """The modules of the language that the module of a function names."""
    named = [value for value in function.__globals__.values() if inspect.ismodule(value)]
    return [module for module in (language, core) if module in named]


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a jitted function from another one."""
    if any(core.is_builtin(module.load) for module in _languages(self.fn)):
        interpreter._patch_lang(self.fn)
    function = self.rewrite()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@cache
def _described(shape: tuple[int, ...], element: str) -> tuple[Any, int, str]:
    """The shape of a block, the number of its elements and the name of its type."""
    block_shape = core.tuple(list(shape))
    return block_shape, core.validate_block_shape(block_shape), f"<{block_shape}, {element}>"


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    assert isinstance(shape, list | core.tuple)
    if not shape:
        raise TypeError("0d block_type is forbidden")
    values = shape.values if isinstance(shape, core.tuple) else shape
    sizes = tuple([s.value if isinstance(s, core.constexpr) else s for s in values])
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _described(sizes, element_ty.name)


@cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The number of elements of a tensor and its shape, both as constants."""
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(s) for s in shape])


def _init_tensor(self: Any, handle: Any, of: Any) -> None:
    self.handle, self.type, self.dtype = handle, of, of.scalar
    self.numel, self.shape = _sizes(tuple(of.shape.values) if of.is_block() else ())


REPLACEMENTS = [
    (interpreter, "_get_np_dtype", _np_dtype),
    (interpreter, "_patch_builtin", _patch_builtin),
    (interpreter.InterpretedFunction, "__call__", _call),
    (core.block_type, "__init__", _init_block_type),
    (core.tensor, "__init__", _init_tensor),
    (interpreter.interpreter_builder, "options", replace(_OPTIONS, sanitize_overflow=False)),
]
OWN = [(owner, name, getattr(owner, name)) for owner, name, _ in REPLACEMENTS]


def install() -> None:
    """Changes the interpreter, if it has the version that this module is written for."""
    if triton.__version__.startswith("3.7."):
        for owner, name, replacement in REPLACEMENTS:
            setattr(owner, name, replacement)
