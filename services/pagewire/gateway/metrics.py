"""Prometheus metrics of a gateway."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagewire.gateway.generation.generation import Generation
from pagewire.lifecycle.metrics import REQUEST_SECONDS, TOKEN_SECONDS
from pagewire.rpc.checksums import CORRUPT_MESSAGES
from pagewire.v1 import inference_pb2 as pb

PREFIX = "pagewire_gateway"
_MODEL = ("model",)
_REFUSAL_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The counters and histograms of one model's generations."""

    generation_seconds: Histogram
    time_to_first_token: Histogram
    time_per_output_token: Histogram
    queue_seconds: Histogram
    prompt_tokens: Counter
    generated_tokens: Counter
    resumed: Counter


class GatewayMetrics:
    """Counters and histograms of one gateway. Times are in seconds.

    Metrics of generations have the label `model`: count them through `of`.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(CORRUPT_MESSAGES)
        self.requests = Counter(
            f"{PREFIX}_requests",
            "HTTP requests answered, by route and outcome: the status, `client_gone` if the client "
            "left before the end, or `failed` if an error ended a stream.",
            ("route", "outcome"),
            registry=registry,
        )
        self.open_requests = Gauge(
            f"{PREFIX}_open_requests", "HTTP requests being answered.", registry=registry
        )
        self.request_seconds = self._histogram(
            "request_seconds",
            "From the head of a successful generating request to the end of its answer.",
            labels=("route",),
        )
        self.refusal_seconds = self._histogram(
            "refusal_seconds",
            "From the head of a generating request to the end of its answer with status 429.",
            _REFUSAL_SECONDS,
        )
        self.generation_seconds = self._histogram(
            "generation_seconds",
            "From a prompt's dispatch to its last token: its time at the schedulers.",
            labels=_MODEL,
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a prompt's dispatch to its first token.",
            labels=_MODEL,
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean time between the tokens of a generation, without the first token.",
            TOKEN_SECONDS,
            labels=_MODEL,
        )
        self.queue_seconds = self._histogram(
            "queue_seconds",
            "From a prompt's arrival at a scheduler to its first admission.",
            labels=_MODEL,
        )
        self.prompt_tokens = Counter(
            f"{PREFIX}_prompt_tokens",
            "Prompt tokens of started generations.",
            _MODEL,
            registry=registry,
        )
        self.generated_tokens = Counter(
            f"{PREFIX}_generated_tokens",
            "Tokens received from schedulers.",
            _MODEL,
            registry=registry,
        )
        self.resumed = Counter(
            f"{PREFIX}_resumed",
            "Generations that continued at another scheduler, or at one that returned.",
            _MODEL,
            registry=registry,
        )
        self._of_models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        """The metrics of a model's generations. After the first call they are scraped, too."""
        found = self._of_models.get(model)
        if found is None:
            found = self._of_models[model] = ModelMetrics(
                self.generation_seconds.labels(model),
                self.time_to_first_token.labels(model),
                self.time_per_output_token.labels(model),
                self.queue_seconds.labels(model),
                self.prompt_tokens.labels(model),
                self.generated_tokens.labels(model),
                self.resumed.labels(model),
            )
        return found

    def _histogram(
        self,
        name: str,
        help_text: str,
        buckets: Sequence[float] = REQUEST_SECONDS,
        labels: Sequence[str] = (),
    ) -> Histogram:
        return Histogram(
            f"{PREFIX}_{name}", help_text, labels, buckets=buckets, registry=self.registry
        )

    def observe_generation(self, generation: Generation) -> None:
        """Records the times of a completed generation."""
        metrics = self.of(generation.model)
        metrics.generation_seconds.observe(generation.ended_at - generation.started_at)
        if generation.finish is not None and generation.finish.HasField("queue_seconds"):
            metrics.queue_seconds.observe(generation.finish.queue_seconds)
        request = generation.request
        at_end = request.HasField("beam_search") or request.HasField("pooling")
        if generation.finish is not None and at_end:
            # The tokens of a beam search arrive with its end, and vectors have no tokens.
            metrics.prompt_tokens.inc(generation.finish.usage.prompt_tokens)
            metrics.generated_tokens.inc(generation.finish.usage.completion_tokens)
            return
        tokens = len(generation.tokens)
        if tokens == 0:
            return
        metrics.time_to_first_token.observe(generation.first_token_at - generation.started_at)
        if tokens > 1:
            span = generation.ended_at - generation.first_token_at
            metrics.time_per_output_token.observe(span / (tokens - 1))


class LoadCollector(Collector):
    """The latest load reports of the schedulers, read when metrics are scraped.

    `loads` returns each scheduler's address, its report, and whether it is ready.
    """

    def __init__(self, loads: Callable[[], Iterable[tuple[str, pb.Load, bool]]]) -> None:
        self._loads = loads

    def collect(self) -> Iterable[Metric]:
        """One sample of each metric for each scheduler."""
        ready = _gauge("scheduler_ready", "1 if the scheduler accepts requests.")
        running = _gauge("running", "Requests running on the scheduler's workers.")
        waiting = _gauge("waiting", "Requests waiting for admission at the scheduler.")
        kv_use = _gauge("kv_utilization", "Fraction of the scheduler's KV blocks in use.")
        workers = _gauge("ready_workers", "Workers connected to the scheduler.")
        preemptions = CounterMetricFamily(
            f"{PREFIX}_preemptions",
            "Preemptions since the scheduler started.",
            labels=["scheduler"],
        )
        for target, load, is_ready in self._loads():
            labels = [target]
            ready.add_metric(labels, float(is_ready))
            running.add_metric(labels, load.running)
            waiting.add_metric(labels, load.waiting)
            kv_use.add_metric(labels, load.used_blocks / max(1, load.total_blocks))
            workers.add_metric(labels, load.ready_workers)
            preemptions.add_metric(labels, load.preemptions)
        return [ready, running, waiting, kv_use, workers, preemptions]


def _gauge(name: str, help_text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", help_text, labels=["scheduler"])
