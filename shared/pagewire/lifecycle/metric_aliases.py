"""Aliases of metrics: other programs' names for Pagewire's metrics, made when scraped."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from pagewire.lifecycle.metrics import StepCounter


@dataclass(frozen=True, slots=True)
class SameAs:
    """`name` is an alias of a Pagewire metric with the same meaning.

    `labels` maps names of Pagewire's labels to new names; other labels keep their names. Samples
    whose labels have a value in `without` are left out.
    """

    name: str
    source: MetricWrapperBase | StepCounter
    labels: Mapping[str, str] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Computed:
    """`name` is a gauge whose value is computed when it is read."""

    name: str
    help: str
    value: Callable[[], float]


class MetricAliases(Collector):
    """Reads Pagewire's metrics and renames their samples. Counting costs nothing more."""

    def __init__(
        self,
        names: Iterable[SameAs | Computed],
        labels: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """`labels` returns labels that are added to each sample."""
        self._names = list(names)
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        """The families without samples: nothing is read when this is registered."""
        return [_family(name) for name in self._names]

    def collect(self) -> Iterable[Metric]:
        """The families with their present samples."""
        labels = self._labels()
        for name in self._names:
            family = _family(name)
            if isinstance(name, Computed):
                family.add_sample(name.name, labels, name.value())
            else:
                _copy_samples(name, family, labels)
            yield family


def _family(name: SameAs | Computed) -> Metric:
    if isinstance(name, Computed):
        return GaugeMetricFamily(name.name, name.help)
    [source] = name.source.describe()
    text = f"The same as {_full_name(source)}{'; ' + name.note if name.note else ''}."
    return Metric(name.name, text, source.type)


def _full_name(family: Metric) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def _copy_samples(name: SameAs, family: Metric, labels: dict[str, str]) -> None:
    for source in name.source.collect():
        for sample in source.samples:
            if name.without.intersection(sample.labels.values()):
                continue
            kept = {name.labels.get(key, key): value for key, value in sample.labels.items()}
            suffix = sample.name.removeprefix(source.name)
            family.add_sample(name.name + suffix, {**labels, **kept}, sample.value)
