"""docs/metrics.md has the metrics of the code, and names of vLLM's mean what ours mean."""

import pytest
from prometheus_client import CollectorRegistry
from tools import metrics_page

from pagewire.gateway.metric_aliases import publish_aliases
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.scheduler import metrics
from pagewire.scheduler.reports.vllm_names import publish_vllm_names
from pagewire.v1 import inference_pb2 as pb

LOADS = [
    pb.Load(running=3, waiting=2, used_blocks=30, total_blocks=60),
    pb.Load(running=1, waiting=4, used_blocks=0, total_blocks=40),
]


def test_the_page_has_the_metrics_of_the_code() -> None:
    page = metrics_page.PAGE.read_text(encoding="utf-8")
    assert page == metrics_page.with_tables(page), f"run {metrics_page.COMMAND}"


def test_every_metric_says_what_it_means() -> None:
    rows = metrics_page.described()
    assert len({(row.process, row.name) for row in rows}) == len(rows) > 60
    assert all(row.meaning.endswith(".") and len(row.meaning) > 10 for row in rows)
    assert {row.process for row in rows} == {"gateway", "scheduler", "worker"}


def test_no_vllm_name_is_on_two_kinds_of_process() -> None:
    names = [row.name for row in metrics_page.described() if row.name.startswith("vllm:")]
    assert len(names) == len(set(names)) > 10


def values(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "m", **labels})


def test_vllm_names_of_a_scheduler_follow_our_metrics() -> None:
    registry = CollectorRegistry()
    publish_vllm_names("m", lambda: LOADS[0], registry)
    assert values(registry, "vllm:num_requests_running") == 3
    assert values(registry, "vllm:num_requests_waiting") == 2
    assert values(registry, "vllm:kv_cache_usage_perc") == 0.5
    before = values(registry, "vllm:prompt_tokens_total") or 0.0
    metrics.PROMPT_TOKENS.inc(5)
    assert values(registry, "vllm:prompt_tokens_total") == before + 5
    assert values(registry, "vllm:prefix_cache_queries_total") == before + 5
    metrics.FINISHED.labels("stop").inc()
    metrics.FINISHED.labels(metrics.HANDED_BACK_REASON).inc()
    found = values(registry, "vllm:request_success_total", finished_reason="stop")
    assert found is not None
    assert found >= 1
    handed_back = {"finished_reason": metrics.HANDED_BACK_REASON}
    assert values(registry, "vllm:request_success_total", **handed_back) is None


@pytest.fixture
def gateway() -> GatewayMetrics:
    gateway = GatewayMetrics()
    publish_aliases(gateway, lambda: LOADS)
    return gateway


def test_vllm_names_of_a_gateway_follow_our_metrics(gateway: GatewayMetrics) -> None:
    gateway.of("a").time_to_first_token.observe(0.3)
    gateway.of("b")
    registry = gateway.registry
    first, second = {"model_name": "a"}, {"model_name": "b"}
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_sum", first) == 0.3
    bucket = {**first, "le": "0.5"}
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_bucket", bucket) == 1
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_count", second) == 0
    assert registry.get_sample_value("vllm:e2e_request_latency_seconds_count", first) == 0


def test_an_endpoint_picker_sees_totals(gateway: GatewayMetrics) -> None:
    value = gateway.registry.get_sample_value
    assert value("pagewire_endpoint_waiting_requests") == 6
    assert value("pagewire_endpoint_running_requests") == 4
    assert value("pagewire_endpoint_kv_utilization") == 0.3
