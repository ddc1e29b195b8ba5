"""Aliases of the gateway's metrics: vLLM's names, and those for an endpoint picker."""

from collections.abc import Callable, Iterable

from pagewire.gateway.metrics import GatewayMetrics
from pagewire.lifecycle.metric_aliases import Computed, MetricAliases, SameAs
from pagewire.v1 import inference_pb2 as pb

PICKER = "pagewire_endpoint"
_NAME = {"model": "model_name"}


def publish_aliases(
    metrics: GatewayMetrics,
    loads: Callable[[], Iterable[pb.Load]],
) -> None:
    """Adds the aliases to the gateway's registry.

    vLLM's names have the label `model_name` instead of our `model`. An endpoint picker of the
    Kubernetes Gateway API inference extension reads the other aliases of each gateway: totals over
    the gateway's schedulers.
    """
    vllm = [
        SameAs("vllm:time_to_first_token_seconds", metrics.time_to_first_token, _NAME),
        SameAs("vllm:request_time_per_output_token_seconds", metrics.time_per_output_token, _NAME),
        SameAs(
            "vllm:time_per_output_token_seconds",
            metrics.time_per_output_token,
            _NAME,
            note="one observation a generation, its mean, where vLLM has one a token",
        ),
        SameAs("vllm:e2e_request_latency_seconds", metrics.generation_seconds, _NAME),
    ]
    metrics.registry.register(MetricAliases(vllm))
    picker = [
        Computed(
            f"{PICKER}_waiting_requests",
            "Requests that wait for admission at the schedulers of this gateway.",
            lambda: sum(load.waiting for load in loads()),
        ),
        Computed(
            f"{PICKER}_running_requests",
            "Requests that run at the schedulers of this gateway.",
            lambda: sum(load.running for load in loads()),
        ),
        Computed(
            f"{PICKER}_kv_utilization",
            "Fraction of the KV blocks in use, from 0 to 1, over the schedulers of this gateway.",
            lambda: _kv_use(list(loads())),
        ),
    ]
    metrics.registry.register(MetricAliases(picker))


def _kv_use(loads: list[pb.Load]) -> float:
    total = sum(load.total_blocks for load in loads)
    return sum(load.used_blocks for load in loads) / max(1, total)
