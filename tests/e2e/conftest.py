"""The stack that the end-to-end tests share, its clients, and the reference model."""

from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagewire.v1 import inference_pb2_grpc
from support.processes.stack_process import EMBEDDED_FOLDER, RunningStack, running_stack


@pytest.fixture(scope="package")
def stack() -> Iterator[RunningStack]:
    """`pagewire run` with the embedded model. A test may kill its worker, which restarts."""
    with running_stack() as started:
        yield started


@pytest.fixture
def client(stack: RunningStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0)


@pytest.fixture
def stub(stack: RunningStack) -> Iterator[inference_pb2_grpc.InferenceStub]:
    """A gRPC client of the stack that the test uses."""
    with grpc.insecure_channel(stack.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.fixture(scope="package")
def reference() -> tuple[Any, Any]:
    """The embedded model and its tokenizer in transformers."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)
