"""The throughput line: rates since the last one, and none without load."""

from pagewire.scheduler import metrics
from pagewire.scheduler.reports.throughput import Throughput, Totals, line
from pagewire.v1 import inference_pb2 as pb

IDLE = pb.Load(total_blocks=100)


def test_rates_are_those_since_the_last_line() -> None:
    throughput = Throughput(Totals(100, 0, 50), now=5.0)
    load = pb.Load(running=3, waiting=2, used_blocks=25, total_blocks=100)
    found = throughput.measure(Totals(300, 50, 1050), load, now=15.0)
    assert found == {
        "prompt_tokens_per_second": 20.0,
        "output_tokens_per_second": 100.0,
        "running": 3,
        "waiting": 2,
        "kv_use": 0.25,
        "prefix_cache_hits": 0.25,
    }
    assert line(found) == (
        "20.0 prompt tokens/s, 100.0 output tokens/s, 3 running, 2 waiting, KV 25.0 % used, "
        "25.0 % of prompt tokens from the cache"
    )


def test_there_is_no_line_without_load() -> None:
    throughput = Throughput(Totals(0, 0, 0), now=0.0)
    assert throughput.measure(Totals(0, 0, 0), IDLE, now=10.0) is None
    assert throughput.measure(Totals(8, 0, 4), IDLE, now=20.0) is not None, "it ended meanwhile"
    assert throughput.measure(Totals(8, 0, 4), IDLE, now=30.0) is None
    stuck = pb.Load(waiting=1, total_blocks=100)
    assert throughput.measure(Totals(8, 0, 4), stuck, now=40.0) is not None


def test_totals_are_those_of_the_metrics() -> None:
    before = Totals.read()
    metrics.PROMPT_TOKENS.inc(7)
    metrics.CACHED_TOKENS.inc(2)
    metrics.OUTPUT_TOKENS.inc(3)
    after = Totals.read()
    grown = after.prompt - before.prompt, after.cached - before.cached, after.output - before.output
    assert grown == (7, 2, 3)
