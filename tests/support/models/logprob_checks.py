"""Compares log probabilities of a worker with those of transformers."""

import torch

from support.models.step_driver import Logprobs


def assert_logprobs(
    logprobs: list[Logprobs],
    output: list[int],
    expected: torch.Tensor,
    num_top: int,
    tolerance: float = 2e-4,
) -> None:
    """Checks each token's value and the `num_top` largest; `expected` is [output, vocabulary]."""
    assert len(logprobs) == len(output)
    for (own, ids, top), token, row in zip(logprobs, output, expected, strict=True):
        values = torch.tensor([own, *top[:num_top]])
        torch.testing.assert_close(values, row[[token, *ids[:num_top]]], rtol=0, atol=tolerance)
        best = row.topk(num_top).values
        torch.testing.assert_close(values[1:], best, rtol=0, atol=tolerance)
        assert len(set(ids)) == len(ids) >= num_top
