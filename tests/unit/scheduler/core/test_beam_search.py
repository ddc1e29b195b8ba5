"""Beam search alone: the same beams and scores as transformers, from the same logits."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pagewire.scheduler.core.beam_search import BeamParams, BeamSearch
from support.models.tiny_models import beam_outputs, save_model

PROMPT = [3, 14, 15, 92, 65, 35]


def search(model: torch.nn.Module, beams: BeamSearch) -> None:
    """Runs a search to its end with a model's logits."""
    while not beams.done:
        rows = torch.tensor([[*PROMPT, *beam.tokens] for beam in beams.running])
        with torch.no_grad():
            logprobs = model(rows).logits[:, -1].log_softmax(-1)
        values, ids = logprobs.topk(beams.num_candidates)
        origins = beams.advance(ids.int().numpy(), values.numpy())
        assert len(origins) == len(beams.running)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    folder: Path = tmp_path_factory.mktemp("beam")
    return save_model(folder, "llama", initializer_range=0.08)


@pytest.mark.parametrize("width", [2, 3, 8, 16])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("stops", [0, 1, 4])
def test_beams_are_those_of_transformers(
    model: torch.nn.Module, width: int, length_penalty: float, early_stopping: bool, stops: int
) -> None:
    stop_ids = stop_tokens(model, stops)
    params = BeamParams(width, length_penalty, early_stopping)
    beams = BeamSearch(params, max_tokens=12, min_tokens=0, stop_ids=stop_ids)
    search(model, beams)
    expected = beam_outputs(
        model,
        PROMPT,
        12,
        stop_ids,
        num_beams=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    assert [list(h.tokens) for h in beams.finished] == [tokens for tokens, _ in expected]
    assert [h.score for h in beams.finished] == pytest.approx(
        [score for _, score in expected], abs=1e-4
    )
    assert [h.stopped for h in beams.finished] == [t[-1] in stop_ids for t, _ in expected]


def test_stop_tokens_do_not_come_too_early(model: torch.nn.Module) -> None:
    stop_ids = stop_tokens(model, 4)
    beams = BeamSearch(BeamParams(4, 1.0, True), 12, min_tokens=6, stop_ids=stop_ids)
    search(model, beams)
    expected = beam_outputs(
        model, PROMPT, 12, stop_ids, num_beams=4, early_stopping=True, min_new_tokens=6
    )
    assert [list(h.tokens) for h in beams.finished] == [tokens for tokens, _ in expected]
    assert all(len(h.tokens) > 6 for h in beams.finished)
    without = BeamSearch(BeamParams(4, 1.0, True), 12, min_tokens=0, stop_ids=stop_ids)
    search(model, without)
    assert any(len(h.tokens) <= 6 for h in without.finished)


def test_a_search_of_one_token() -> None:
    beams = BeamSearch(BeamParams(2, 1.0, False), max_tokens=1, min_tokens=0, stop_ids=(9,))
    ids = np.array([[5, 9, 7]], np.int32)
    assert beams.advance(ids, np.array([[-0.5, -1.0, -2.0]], np.float32)) == []
    assert beams.done
    assert [(h.tokens, h.score, h.stopped) for h in beams.finished] == [
        ((5,), -0.5, False),
        ((9,), -1.0, True),
    ]


def stop_tokens(model: torch.nn.Module, count: int) -> tuple[int, ...]:
    """Tokens that beams do reach: from the middle of a greedy output and beside it."""
    if not count:
        return ()
    plain = BeamSearch(BeamParams(4, 1.0, False), max_tokens=8, min_tokens=0, stop_ids=())
    search(model, plain)
    met = dict.fromkeys(token for h in plain.finished for token in h.tokens[3:])
    return tuple(met)[:count]
