"""The metrics of generations that ended."""

from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.v1 import inference_pb2 as pb


def test_the_tokens_of_a_beam_search_are_counted_at_its_end() -> None:
    metrics = GatewayMetrics()
    request = pb.GenerateRequest(beam_search=pb.BeamSearch(width=2))
    search = Generation(request, 0, 0, UpdateQueue(), False)
    usage = pb.Usage(prompt_tokens=9, completion_tokens=25)
    search.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage))
    metrics.observe_generation(search)
    assert metrics.registry.get_sample_value("pagewire_gateway_prompt_tokens_total") == 9
    assert metrics.registry.get_sample_value("pagewire_gateway_generated_tokens_total") == 25
    assert metrics.registry.get_sample_value("pagewire_gateway_generation_seconds_count") == 1
    assert (
        metrics.registry.get_sample_value("pagewire_gateway_time_to_first_token_seconds_count") == 0
    )
