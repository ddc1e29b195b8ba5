"""The Python API: models in processes of their own, called from a script or a notebook.

It has no HTTP. It starts workers and a scheduler, and follows requests with the gateway's rooms
`api`, `generation` and `routing`. So a request survives the loss of a process here, too.
"""

from pagewire.errors import RequestError
from pagewire.llm.async_llm import AsyncLLM
from pagewire.llm.llm import LLM
from pagewire.llm.outputs import CompletionOutput, Logprob, RequestOutput, ToolCall
from pagewire.llm.params import SamplingParams
from pagewire.llm.pooled import EmbeddingOutput, ScoreOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "ToolCall",
]
