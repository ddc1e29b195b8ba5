"""Log probabilities of some rows of a step, packed for the copy to the host."""

import numpy as np
import pytest
import torch

from pagewire.worker.ops import load_ops
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows
from pagewire.worker.runtime.device_logprobs import PendingLogprobs, compute_logprobs


@pytest.mark.parametrize("ops", ["torch", "triton"])
@pytest.mark.parametrize(("num_top", "vocabulary"), [(0, 3000), (3, 3000), (20, 3000), (7, 9)])
def test_rows_are_chosen_and_packed(ops, num_top, vocabulary, device):
    torch.manual_seed(0)
    logits = torch.randn(5, vocabulary, device=device).bfloat16()
    logits[0] = torch.nan
    tokens = torch.tensor([-1, 3, 2, 1, 0], dtype=torch.int32, device=device)
    wanted = LogprobRows(np.array([0, 1, 4], np.int32), num_top)
    packed = compute_logprobs(load_ops(ops), logits, tokens, wanted)
    got = PendingLogprobs(wanted, packed.cpu()).read()
    expected = logits[[1, 4]].float().log_softmax(-1)
    best = expected.topk(num_top).values
    assert got.rows.tolist() == [0, 1, 4]
    assert got.top_ids.shape == got.top.shape == (3, num_top)
    torch.testing.assert_close(torch.tensor(got.chosen[1:]), expected[[0, 1], [3, 0]].cpu())
    torch.testing.assert_close(torch.tensor(got.top[1:]), best.cpu())
    ids = torch.tensor(got.top_ids[1:]).long().to(device)
    torch.testing.assert_close(expected.gather(1, ids), best)
    fields = got.fields(np.array([-1, 3, 2, 1, 0], np.int32), np.array([0, 1, -1, 2, 3, 4]))
    assert np.frombuffer(fields["logprob_rows"], "<i4").tolist() == [1, 5]
    assert {name: len(data) for name, data in fields.items()} == {
        "logprob_rows": 8,
        "logprobs": 8,
        "top_ids": 8 * num_top,
        "top_logprobs": 8 * num_top,
    }
