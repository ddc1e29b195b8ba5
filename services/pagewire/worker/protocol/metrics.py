"""The Prometheus metrics of a worker."""

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from pagewire.lifecycle import draft_counter
from pagewire.lifecycle.metrics import TOKEN_SECONDS
from pagewire.worker.protocol.steps.limits import Limits


class WorkerMetrics:
    """The metrics of one worker process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def name(suffix: str) -> str:
            return f"pagewire_worker_{suffix}"

        self.steps = Counter(name("steps"), "Steps computed.", registry=registry)
        tokens = Counter(name("tokens"), "Tokens computed.", ["phase"], registry=registry)
        self.prefill_tokens = tokens.labels("prefill")
        self.decode_tokens = tokens.labels("decode")
        drafts = Counter(
            name("drafts"), draft_counter.MEANING, draft_counter.LABELS, registry=registry
        )
        self.drafts = draft_counter.DraftCounter(drafts)
        self.step_seconds = Histogram(
            name("step_seconds"),
            "Time from the start of a step's computation to its last token.",
            buckets=(0.0005, *TOKEN_SECONDS),
            registry=registry,
        )
        self.failures = Counter(
            name("failed_sequences"), "Sequences that failed on this worker.", registry=registry
        )
        self.late_compilations = Counter(
            name("late_compilations"),
            "Kernel variants that were compiled while serving.",
            registry=registry,
        )
        self.slots_in_use = Gauge(
            name("slots_in_use"),
            "Sequences in the latest step; 0 after a second without steps.",
            registry=registry,
        )
        self._slot_counts: list[Callable[[], int]] = []
        self.slots_in_use.set_function(lambda: sum(count() for count in self._slot_counts))
        self.slots = Gauge(name("slots"), "Maximum number of sequences at once.", registry=registry)
        self.weight_bytes = Gauge(name("weight_bytes"), "Bytes of the weights.", registry=registry)
        self.kv_cache_bytes = Gauge(
            name("kv_cache_bytes"), "Bytes of the KV cache.", registry=registry
        )
        self.kv_cache_blocks = Gauge(
            name("kv_cache_blocks"), "Blocks of the KV cache.", registry=registry
        )
        self.host_blocks = Gauge(
            name("host_blocks"), "KV blocks in the host's memory.", registry=registry
        )
        self.saved_blocks = Counter(
            name("saved_blocks"), "KV blocks copied to the host's memory.", registry=registry
        )
        self.loaded_blocks = Counter(
            name("loaded_blocks"), "KV blocks copied from the host's memory.", registry=registry
        )

    def count_slots(self, in_use: Callable[[], int]) -> None:
        """Adds the slots of a worker of this process, counted at each scrape."""
        self._slot_counts.append(in_use)

    def set_sizes(
        self, limits: Limits, weight_bytes: int, kv_cache_bytes: int, workers: int = 1
    ) -> None:
        """Publishes the sizes of all workers of this process, which are equal."""
        self.weight_bytes.set(weight_bytes * workers)
        self.kv_cache_bytes.set(kv_cache_bytes * workers)
        self.kv_cache_blocks.set(limits.num_blocks * workers)
        self.host_blocks.set(limits.host_blocks * workers)
        self.slots.set(limits.num_slots * workers)
