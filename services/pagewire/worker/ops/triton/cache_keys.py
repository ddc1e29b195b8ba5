"""Keys of kernels in Triton's cache that are the same in every process."""

from importlib import import_module
from pkgutil import walk_packages

from triton.runtime.jit import JITFunction

from pagewire.worker.ops import triton as package


def compute_cache_keys() -> None:
    """Has the keys of all functions computed, in one order.

    The key that Triton gives a function holds the globals of only those functions it calls that
    were given theirs before. Left to the order of launches, a process would look in vain for what
    another has compiled.
    """
    modules = walk_packages(package.__path__, f"{package.__name__}.")
    for name in sorted(module.name for module in modules):
        module = import_module(name)
        for value in vars(module).values():
            if isinstance(value, JITFunction) and value.__module__ == module.__name__:
                _ = value.cache_key
