"""Stream token ids and text from a scheduler over gRPC. Start `pagewire run` first.

python examples/grpc_client.py [HOST:PORT]
"""

import sys

import grpc

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1.inference_pb2_grpc import InferenceStub


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    with grpc.insecure_channel(address) as channel:
        scheduler = InferenceStub(channel)
        [model] = scheduler.ListModels(pb.ListModelsRequest()).models
        print(f"{model.id}: {model.vocab_size} tokens, up to {model.max_model_len} in a sequence")
        request = pb.GenerateRequest(
            prompt="Once upon a time",
            sampling=pb.SamplingParams(temperature=0),
            stop=pb.StopConditions(max_tokens=24),
        )
        for response in scheduler.Generate(request):
            print(list(response.token_ids), repr(response.text))
            if response.HasField("finish"):
                print(pb.FinishReason.Name(response.finish.reason))


if __name__ == "__main__":
    main()
