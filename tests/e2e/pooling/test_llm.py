"""Embeddings and scores by the Python API, with real processes."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from pagewire.llm import LLM, RequestError
from support.models.pooling_models import (
    VOCAB_WITH_TEXT,
    classified,
    embedding,
    save_classifier,
    save_embedder,
    save_tokenizer,
)
from support.waiting import until

SETTINGS = {"num_blocks": 600, "num_slots": 32, "torch_threads": 1}


def close(found: list[float], wanted: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-5)


def test_embeddings(tmp_path: Path) -> None:
    model = save_embedder(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with LLM(tmp_path, **SETTINGS) as llm:
        texts = [f"text {number} " * (1 + number % 30) for number in range(300)]
        answers = []
        running = threading.Thread(target=lambda: answers.extend(llm.embed(texts, dimensions=9)))
        running.start()
        until(lambda: next(iter(llm._stack.connected().schedulers.links.values())).load.running)
        os.kill(llm._stack.pids["worker-0"], signal.SIGKILL)
        running.join()
        assert len(answers) == len(texts)
        for text, answer in zip(texts, answers, strict=True):
            ids = tokenizer.encode(text).ids
            close(answer.embedding, embedding(model, ids, "last", 9))
            assert (answer.num_prompt_tokens, answer.error) == (len(ids), None)
        [by_ids] = llm.embed([5, 6, 7])
        close(by_ids.embedding, embedding(model, [5, 6, 7], "last"))
        assert llm.embed([]) == []
        with pytest.raises(RequestError, match=r"prompt 1: .*outside the model's vocabulary"):
            llm.embed([[5], [10_000]])
        good, bad = llm.embed([[5], [10_000]], on_error="return")
        assert good.error is None
        assert (bad.embedding, bad.error.field) == ([], "prompt")
        with pytest.raises(RequestError, match=r"dimension is not a parameter.*dimensions"):
            llm.embed("a", dimension=3)
        with pytest.raises(RequestError, match="gives embeddings only"):
            llm.generate("a")
        with pytest.raises(RequestError, match="gives embeddings only"):
            llm.score("a", "b")


def test_scores(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "llama", vocab_size=VOCAB_WITH_TEXT)
    tokenizer = save_tokenizer(tmp_path)
    documents = ["first", "the second", "a third one"]
    with LLM(tmp_path, **SETTINGS) as llm:
        for queries in ("what", ["what", "who", "why"]):
            answers = llm.score(queries, documents)
            each = [queries] * 3 if isinstance(queries, str) else queries
            for query, document, answer in zip(each, documents, answers, strict=True):
                logit = classified(model, tokenizer.encode(query, document).ids)
                close([answer.score], [torch.tensor(logit).sigmoid().item()])
        with pytest.raises(RequestError, match="text_1 has 2 texts and text_2 3"):
            llm.score(["a", "b"], documents)
