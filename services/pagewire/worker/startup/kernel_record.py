"""What a worker's start leaves in Triton's cache for later starts of the same configuration.

A marker file tells that every kernel is compiled. A worker that finds it starts no `CompilePool`.
If the cache was emptied in part, the worker compiles the missing kernels itself: it only starts
later. A second file has the algorithms of its GEMMs. This module needs neither torch nor triton, so
that the marker can be looked up before they are imported.
"""

import json
import logging
import os
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pagewire import limits
from pagewire.config import WorkerConfig
from pagewire.json_files import read_json_object
from pagewire.models import resolve_model

log = logging.getLogger(__name__)

# The NVIDIA driver's folder with one entry for each GPU.
GPUS = Path("/proc/driver/nvidia/gpus")


class KernelRecord:
    """The files of one configuration with the present code and GPUs."""

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

    def gemms(self) -> dict[str, Any] | None:
        """What `keep_gemms` has kept, of any kind of GPU; None if that is nothing."""
        try:
            return None if self._path is None else read_json_object(_gemms(self._path))
        except (OSError, ValueError):
            return None

    def keep_gemms(self, choices: dict[str, Any]) -> None:
        """Keeps the algorithms of GEMMs, a JSON object, for later starts."""
        if self._path is None:
            return
        path = _gemms(self._path)
        written = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(choices))
            written.replace(path)  # at once: another worker may read it now
        except OSError as error:
            log.warning("the next start will measure GEMMs again: %s", error)


def _gemms(marker: Path) -> Path:
    return marker.with_name(f"{marker.name}-gemms.json")


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
