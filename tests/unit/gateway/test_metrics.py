"""The metrics of generations that ended."""

from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.page.engine_view import _sum_and_count
from pagewire.v1 import inference_pb2 as pb


def test_the_tokens_of_a_beam_search_are_counted_at_its_end() -> None:
    metrics = GatewayMetrics()
    request = pb.GenerateRequest(model="m", beam_search=pb.BeamSearch(width=2))
    search = Generation(request, 0, 0, UpdateQueue(), False)
    usage = pb.Usage(prompt_tokens=9, completion_tokens=25)
    search.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage))
    metrics.observe_generation(search)
    counted = ("prompt_tokens_total", "generated_tokens_total", "generation_seconds_count")
    assert [value(metrics, name, "m") for name in counted] == [9, 25, 1]
    assert value(metrics, "time_to_first_token_seconds_count", "m") == 0


def test_models_are_counted_apart() -> None:
    metrics = GatewayMetrics()
    for model, count in (("a", 2), ("b", 3)):
        for _ in range(count):
            request = pb.GenerateRequest(model=model)
            generation = Generation(request, 0, 0, UpdateQueue(), False)
            generation.extend(bytes(8), b"", generation.started_at + 0.25)
            generation.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH, queue_seconds=0.5))
            metrics.observe_generation(generation)
    for name in ("generation", "time_to_first_token", "time_per_output_token", "queue"):
        assert [value(metrics, f"{name}_seconds_count", model) for model in "ab"] == [2, 3]
    assert _sum_and_count(metrics.time_to_first_token) == (1.25, 5), "the page shows all models"


def value(metrics: GatewayMetrics, name: str, model: str) -> float | None:
    """A sample of a model."""
    return metrics.registry.get_sample_value(f"pagewire_gateway_{name}", {"model": model})
