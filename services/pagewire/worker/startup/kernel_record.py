"""A record, beside Triton's cache, that every kernel of such a worker is in there.

A worker that finds it need not look for kernels to compile, nor start the processes that would do
that. Where it is wrong, since somebody has emptied the cache in part, the worker compiles what is
missing by itself: it starts late, and writes the record again. Nothing here needs torch or triton,
so that it can be looked up before they are imported.
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

# What the driver says of each GPU of the machine.
GPUS = Path("/proc/driver/nvidia/gpus")


class KernelRecord:
    """That of workers of one configuration, with the code and GPUs that there are now."""

    def __init__(self, config: WorkerConfig) -> None:
        self._path = _path(config)

    def exists(self) -> bool:
        """Whether such a worker has found or compiled all its kernels before."""
        return self._path is not None and self._path.exists()

    def write(self) -> None:
        """Notes that all kernels of such a worker are in Triton's cache now."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            log.warning("the next start will look for kernels to compile again: %s", error)


def cache_folder() -> Path:
    """Triton's own cache."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME", "~")
    return Path(folder) if folder else Path(home).expanduser() / ".triton" / "cache"


def _path(config: WorkerConfig) -> Path | None:
    """The file whose name says all that kernels depend on; None if some of it cannot be read."""
    try:
        depends_on = (
            _version("torch"),
            _version("triton"),
            _gpu_models(),
            config.device,
            config.dtype,
            config.block_size,
            config.num_slots,
            config.worker_max_num_batched_tokens,
            config.host_memory_gb > 0,
            (resolve_model(config.model) / "config.json").read_bytes(),
        )
        digest = sha256(repr(depends_on).encode())
        for source in (Path(limits.__file__), *sorted(Path(__file__).parents[1].rglob("*.py"))):
            digest.update(source.read_bytes())
    except OSError:
        return None  # if it is the model, whoever loads it says what is wrong
    return cache_folder() / f"pagewire-{digest.hexdigest()}"


def _version(package: str) -> str:
    """Of an installed package; empty if it goes by another name."""
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
