"""Metrics of steps are exposed like those of prometheus_client."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pagewire.lifecycle.metrics import TOKEN_SECONDS, StepCounter, StepHistogram


def exposed(registry: CollectorRegistry) -> list[str]:
    """The text for a scraper, without the times of creation."""
    return [
        line for line in generate_latest(registry).decode().splitlines() if "_created" not in line
    ]


def test_they_equal_those_of_prometheus_client() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tokens, counter = StepCounter("a", "Tokens.", ours), Counter("a", "Tokens.", registry=theirs)
    steps = StepHistogram("b", "Steps.", TOKEN_SECONDS, ours)
    histogram = Histogram("b", "Steps.", buckets=TOKEN_SECONDS, registry=theirs)
    assert exposed(ours) == exposed(theirs)
    for value in (0.0, 0.001, 0.0011, 0.3, 2.0, 2.5, 1000.0):
        tokens.inc(3)
        counter.inc(3)
        steps.observe(value)
        histogram.observe(value)
    assert exposed(ours) == exposed(theirs)
    assert any('le="+Inf"' in line and line.endswith(" 7.0") for line in exposed(ours))
