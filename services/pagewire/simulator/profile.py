"""The devices that can be simulated, each with one model: `profiles.json`."""

import json
from dataclasses import dataclass, fields
from importlib.resources import files

from pagewire.simulator.step_time import StepTime, Work, fit
from pagewire.worker.protocol.backend import HostCosts


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured time, the measured work, and the source where the figure is published."""

    what: str
    source: str
    work: Work
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """One model on one device."""

    name: str
    machine: str
    weight_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int  # the device's memory that is left for the KV cache
    # The rate of copies between the device and pinned host memory, in either direction.
    host_bytes_per_second: float
    host_bytes_source: str
    max_num_batched_tokens: int
    measurements: tuple[Measurement, ...]
    step_time: StepTime

    def blocks(self, block_size: int) -> int:
        """KV blocks that fit on the device."""
        return self.kv_cache_bytes // (self.kv_bytes_per_token * block_size)

    def host_blocks(self, gigabytes: float, block_size: int) -> int:
        """KV blocks that fit into this much host memory."""
        return int(gigabytes * 1e9) // (self.kv_bytes_per_token * block_size)

    def host_costs(self, block_size: int) -> HostCosts:
        """The costs of copying blocks and of computing prompts."""
        copy = self.kv_bytes_per_token * block_size / self.host_bytes_per_second
        return HostCosts(
            save_block=copy,
            load_block=copy,
            prefill_token=self.step_time.per_prefill_token,
            prefill_pair=self.step_time.per_prefill_pair,
        )


def load_profile(name: str) -> Profile:
    """The profile of that name; ValueError lists the known names."""
    raw = json.loads(files("pagewire.simulator").joinpath("profiles.json").read_text("utf-8"))
    if name not in raw:
        raise ValueError(f"profile {name!r} does not exist; there are {', '.join(raw)}")
    entry = raw[name]
    measurements = tuple(_measurement(given) for given in entry.pop("measurements"))
    step_time = fit((m.work, m.seconds) for m in measurements)
    return Profile(name=name, measurements=measurements, step_time=step_time, **entry)


def _measurement(given: dict[str, object]) -> Measurement:
    work = {field.name: given.pop(field.name) for field in fields(Work)}
    return Measurement(work=Work(**work), **given)  # type: ignore[arg-type]
