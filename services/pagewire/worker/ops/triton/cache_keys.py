"""Keys of kernels in Triton's cache, made equal in every process."""

from importlib import import_module
from pkgutil import walk_packages

from triton.runtime.jit import JITFunction

from pagewire.worker.ops import triton as package


def compute_cache_keys() -> None:
    """Compute the cache keys of all jitted functions, in a fixed order.

    Triton caches the key of a function when it first computes it. The key includes the globals of
    the functions that it calls only if their keys were computed before. The order of launches
    differs between processes: in that order, a process would not find kernels that another one
    compiled.
    """
    modules = walk_packages(package.__path__, f"{package.__name__}.")
    for name in sorted(module.name for module in modules):
        module = import_module(name)
        for value in vars(module).values():
            if isinstance(value, JITFunction) and value.__module__ == module.__name__:
                _ = value.cache_key
