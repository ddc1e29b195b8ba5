"""From a GenerateRequest to a checked request."""

from pagewire.packing import unpack, unpack_floats
from pagewire.scheduler.requests.parsing import parse_request
from pagewire.scheduler.requests.prompt import ModelLimits
from pagewire.scheduler.text.tokenizer import (
    Tokenizer,
)
from pagewire.v1 import inference_pb2 as pb


def test_biases_travel_in_the_order_of_their_ids(byte_level: Tokenizer) -> None:
    limits = ModelLimits(max_model_len=100, max_pool_tokens=100, vocab_size=10)
    message = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1]))
    message.sampling.logit_bias.update({7: 0, 9: 1.5, 3: -2})  # 0 is not a bias
    sampling = parse_request(message, byte_level, limits).sampling
    assert unpack(sampling.bias_ids).tolist() == [3, 9]
    assert unpack_floats(sampling.biases).tolist() == [-2.0, 1.5]
