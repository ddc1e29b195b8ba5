"""The scheduler's metrics under vLLM's names."""

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry

from pagewire.lifecycle.metric_aliases import Computed, MetricAliases, SameAs
from pagewire.scheduler import metrics
from pagewire.v1 import inference_pb2 as pb


def publish_vllm_names(
    model: str, load: Callable[[], pb.Load], registry: CollectorRegistry = REGISTRY
) -> None:
    """Adds the names to a registry. Each has the label `model_name`, as vLLM's have."""
    names: list[SameAs | Computed] = [
        Computed(
            "vllm:num_requests_running",
            "Requests running on the scheduler's workers.",
            lambda: load().running,
        ),
        Computed(
            "vllm:num_requests_waiting",
            "Requests waiting for admission.",
            lambda: load().waiting,
        ),
        Computed(
            "vllm:kv_cache_usage_perc",
            "Fraction of the KV blocks in use, from 0 to 1.",
            lambda: kv_use(load()),
        ),
        SameAs("vllm:num_preemptions", metrics.PREEMPTIONS),
        SameAs("vllm:prompt_tokens", metrics.PROMPT_TOKENS),
        SameAs("vllm:generation_tokens", metrics.OUTPUT_TOKENS),
        SameAs("vllm:prefix_cache_queries", metrics.PROMPT_TOKENS, note="it counts tokens"),
        SameAs("vllm:prefix_cache_hits", metrics.CACHED_TOKENS, note="it counts tokens"),
        SameAs("vllm:request_queue_time_seconds", metrics.QUEUE_SECONDS),
        SameAs(
            "vllm:request_success",
            metrics.FINISHED,
            {"reason": "finished_reason"},
            without=frozenset({metrics.HANDED_BACK_REASON}),
        ),
    ]
    registry.register(MetricAliases(names, lambda: {"model_name": model}))


def kv_use(load: pb.Load) -> float:
    """The fraction of the KV blocks in use."""
    return float(load.used_blocks / max(1, load.total_blocks))
