"""A marker file in Triton's cache: every kernel of a worker of this configuration is compiled.

A worker that finds the file starts no `CompilePool`. If the cache was emptied in part, the worker
compiles the missing kernels itself: it only starts later. This module needs neither torch nor
triton, so that the file can be looked up before they are imported.
"""

import logging
import os
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pagewire import limits
from pagewire.config import WorkerConfig
from pagewire.models import resolve_model

log = logging.getLogger(__name__)

# The NVIDIA driver's folder with one entry for each GPU.
GPUS = Path("/proc/driver/nvidia/gpus")


class KernelRecord:
    """The marker file of one configuration with the present code and GPUs."""

    def __init__(self, config: WorkerConfig) -> None:
        self._path = _path(config)

    def exists(self) -> bool:
        """Whether a worker of this configuration has compiled all its kernels before."""
        return self._path is not None and self._path.exists()

    def write(self) -> None:
        """Records that all kernels of this configuration are in Triton's cache."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            log.warning("the next start will look for kernels to compile again: %s", error)


def cache_folder() -> Path:
    """The folder of Triton's cache."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME", "~")
    return Path(folder) if folder else Path(home).expanduser() / ".triton" / "cache"


def _path(config: WorkerConfig) -> Path | None:
    """The file, named by a hash of all that kernels depend on; None if that cannot be read."""
    try:
        depends_on = (
            _version("torch"),
            _version("triton"),
            _gpu_models(),
            config.device,
            config.dtype,
            config.quantization,
            config.kv_cache_dtype,
            config.block_size,
            config.num_slots,
            config.worker_max_num_batched_tokens,
            config.host_memory_gb > 0,
            config.batch_invariant,
            config.speculate,
            (resolve_model(config.model) / "config.json").read_bytes(),
            b"" if config.draft_model is None else _draft_model(config.draft_model),
        )
        digest = sha256(repr(depends_on).encode())
        for source in (Path(limits.__file__), *sorted(Path(__file__).parents[1].rglob("*.py"))):
            digest.update(source.read_bytes())
    except OSError:
        return None  # a model that cannot be read is reported when it is loaded
    return cache_folder() / f"pagewire-{digest.hexdigest()}"


def _draft_model(name: str) -> bytes:
    return (resolve_model(name) / "config.json").read_bytes()


def _version(package: str) -> str:
    """The version of an installed package; empty if no package has this name."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _gpu_models() -> list[str]:
    return sorted(
        line.partition(":")[2].strip()
        for information in GPUS.glob("*/information")
        for line in information.read_text().splitlines()
        if line.startswith("Model:")
    )
