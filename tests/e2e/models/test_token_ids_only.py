"""A lone config.json: random weights and no tokenizer serve token ids, over HTTP and gRPC."""

import json
from collections.abc import Iterator

import openai
import pytest

from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.processes.stack_process import RunningStack, running_stack

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
    "eos_token_id": 299,
}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Replaces the folder's stack in this module."""
    folder = tmp_path_factory.mktemp("lone")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with running_stack("--skip-tokenizer", "--load-format", "dummy", model=folder) as started:
        yield started


def test_completions_of_token_ids_have_no_text(
    stack: RunningStack, client: openai.OpenAI, stub: inference_pb2_grpc.InferenceStub
) -> None:
    [model] = client.models.list()
    extra = {"ignore_eos": True, "return_token_ids": True}
    fields = {"temperature": 0, "max_tokens": 8, "extra_body": extra}
    whole = client.completions.create(model=model.id, prompt=PROMPT, logprobs=1, **fields)
    assert whole.choices[0].text == ""
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    assert len(whole.choices[0].logprobs.token_logprobs) == 8
    chunks = list(client.completions.create(model=model.id, prompt=PROMPT, stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == ""
    assert chunks[-1].choices[0].finish_reason == "length"
    ids = [
        token
        for response in stub.Generate(
            pb.GenerateRequest(
                prompt_token_ids=pb.TokenIds(ids=PROMPT),
                sampling=pb.SamplingParams(temperature=0),
                stop=pb.StopConditions(max_tokens=8, ignore_eos=True),
            )
        )
        for token in response.token_ids
    ]
    assert len(ids) == 8
    assert whole.choices[0].token_ids == ids
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert [token for choice in choices for token in choice.token_ids or []] == ids
    stopped = client.completions.create(
        model=model.id,
        prompt=PROMPT,
        temperature=0,
        max_tokens=8,
        extra_body={"stop_token_ids": [ids[3]], "ignore_eos": True},
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens == ids.index(ids[3]) + 1


def test_text_is_refused_with_the_remedy(stack: RunningStack, client: openai.OpenAI) -> None:
    [model] = client.models.list()
    with pytest.raises(
        openai.BadRequestError, match=r"no tokenizer .*give the prompt as token ids"
    ):
        client.completions.create(model=model.id, prompt="hello")
    with pytest.raises(
        openai.BadRequestError, match=r"no tokenizer .*give token ids as the prompt"
    ):
        client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "hello"}]
        )
    with pytest.raises(openai.BadRequestError, match=r"stop strings need the text.*stop_token_ids"):
        client.completions.create(model=model.id, prompt=PROMPT, stop=["x"])
