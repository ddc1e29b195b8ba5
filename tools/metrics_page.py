"""docs/metrics.md: every metric of every process, read from the code.

python tools/metrics_page.py            writes the page's tables
python tools/metrics_page.py --check    exits with status 1 if they are not those of the code
"""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from pagewire.gateway.metric_aliases import publish_aliases
from pagewire.gateway.metrics import GatewayMetrics, LoadCollector
from pagewire.lifecycle.loop_lag import measure_loop_lag
from pagewire.lifecycle.metric_aliases import MetricAliases, SameAs
from pagewire.lifecycle.metrics import StepCounter, StepHistogram, count_tasks
from pagewire.rpc.checksums import CORRUPT_MESSAGES
from pagewire.scheduler import metrics as scheduler_metrics
from pagewire.scheduler.reports.vllm_names import publish_vllm_names
from pagewire.v1 import inference_pb2 as pb
from pagewire.worker.protocol.metrics import WorkerMetrics

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
COMMAND = "python tools/metrics_page.py"
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"

# Metrics of every Python process; prometheus_client documents them.
_PYTHONS = ("process_", "python_")
_METRICS = (MetricWrapperBase, StepCounter, StepHistogram)
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}


@dataclass(frozen=True, slots=True)
class Described:
    """A metric as a scraper sees it, and the processes that have it."""

    process: str
    name: str  # with _total for a counter, as in queries
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def series(self) -> list[str]:
        """The names of its samples."""
        base = self.name.removesuffix("_total") if self.kind == "counter" else self.name
        return [base + suffix for suffix in _SUFFIXES[self.kind]]


def described() -> list[Described]:
    """All metrics of the processes, as served."""
    return asyncio.run(_described())


async def _described() -> list[Described]:
    gateway, worker = GatewayMetrics(), CollectorRegistry()
    gateway.registry.register(LoadCollector(lambda: [("a", pb.Load(), True)]))
    publish_aliases(gateway, lambda: [pb.Load()])
    scheduler = CollectorRegistry()
    for value in vars(scheduler_metrics).values():
        if isinstance(value, _METRICS):
            scheduler.register(value)
    publish_vllm_names("a", pb.Load, scheduler)
    WorkerMetrics(worker)
    for registry in (scheduler, worker):
        registry.register(CORRUPT_MESSAGES)
    registries = {"gateway": gateway.registry, "scheduler": scheduler, "worker": worker}
    found: list[Described] = []
    for process, registry in registries.items():
        count_tasks(registry)
        measure_loop_lag(registry)
        found += _of_registry(process, registry)
    return found


def _of_registry(process: str, registry: CollectorRegistry) -> Iterator[Described]:
    # The registry has its collectors, but offers only their samples.
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricAliases):
            yield from _aliases(process, collector)
        elif isinstance(collector, _METRICS):
            [family] = collector.describe()
            yield _row(process, family, _labels_of(collector))
        else:
            for family in collector.collect():
                if not family.name.startswith(_PYTHONS):
                    yield _row(process, family, list(family.samples[0].labels))


def _aliases(process: str, collector: MetricAliases) -> Iterator[Described]:
    common = tuple(collector._labels())
    for name, family in zip(collector._names, collector.describe(), strict=True):
        labels: tuple[str, ...] = ()
        if isinstance(name, SameAs):
            labels = tuple(name.labels.get(each, each) for each in _labels_of(name.source))
        yield _row(process, family, (*common, *labels))


def _labels_of(metric: MetricWrapperBase | StepCounter | StepHistogram) -> tuple[str, ...]:
    """The names of its labels; metrics of steps have none."""
    return tuple(metric._labelnames) if isinstance(metric, MetricWrapperBase) else ()


def _row(process: str, family: Metric, labels: list[str] | tuple[str, ...]) -> Described:
    name = family.name + ("_total" if family.type == "counter" else "")
    return Described(process, name, family.type, tuple(labels), family.documentation)


def tables() -> str:
    """The tables of the page."""
    rows = described()
    shared = [r for r in rows if sum(o.name == r.name for o in rows) > 1]
    parts = []
    for title, chosen in (
        ("Gateway", [r for r in rows if r.process == "gateway"]),
        ("Scheduler", [r for r in rows if r.process == "scheduler"]),
        ("Worker", [r for r in rows if r.process == "worker"]),
        ("Every process", list({r.name: r for r in shared}.values())),
    ):
        own = [r for r in chosen if r not in shared or title == "Every process"]
        own.sort(key=lambda r: (not r.name.startswith("pagewire"), r.name))
        parts += [f"## {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        parts += [_line(row) for row in own]
        parts.append("")
    return "\n".join(parts)


def _line(row: Described) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    meaning = row.meaning.replace("|", "\\|")
    return f"| `{row.name}` | {row.kind} | {labels} | {meaning} |"


def with_tables(page: str) -> str:
    """The page with the tables of the code."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def main() -> None:
    """Writes the page, or compares it."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = with_tables(page)
    if "--check" not in sys.argv:
        PAGE.write_text(wanted, encoding="utf-8")
    elif page != wanted:
        sys.exit(f"{PAGE} does not have the metrics of the code: run {COMMAND}")


if __name__ == "__main__":
    main()
