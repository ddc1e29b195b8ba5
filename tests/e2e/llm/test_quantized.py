"""Quantized weights answer like plain ones, through all processes."""

from pathlib import Path
from typing import Any

import pytest

from pagewire.llm import LLM, SamplingParams
from pagewire.models import resolve_model
from pagewire.worker.quantizing.folder import quantize_folder

ANSWERS = {
    "What is seven plus five?": "Seven plus five is twelve.",
    "What colour is the sky?": "The sky is blue.",
}


@pytest.mark.parametrize(
    "kind", ["a folder in four bits", "FP8 while loading", "KV in FP8", "all in FP8"]
)
def test_the_embedded_model_answers(tmp_path: Path, kind: str) -> None:
    model, settings = resolve_model("embedded"), dict[str, Any]()
    if kind in ("KV in FP8", "all in FP8"):
        settings["kv_cache_dtype"] = "fp8"
    if kind in ("FP8 while loading", "all in FP8"):
        settings["quantization"] = "fp8"
    if kind == "a folder in four bits":
        quantize_folder(model, tmp_path / "small", "int4", 128)
        model = tmp_path / "small"
    with LLM(model, **settings) as llm:
        chats = [[{"role": "user", "content": question}] for question in ANSWERS]
        outputs = llm.chat(chats, SamplingParams(max_tokens=24, temperature=0), progress=False)
    assert [output.outputs[0].text for output in outputs] == list(ANSWERS.values())
