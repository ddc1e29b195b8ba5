"""The interpreter of the tests has the results and errors of Triton's own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from support.kernels.comparison import CUDA
from support.kernels.quick_interpreter import OWN, REPLACEMENTS

pytestmark = [
    pytest.mark.skipif(CUDA, reason="on a GPU no test runs in the interpreter"),
    pytest.mark.skipif(
        not triton.__version__.startswith("3.7."), reason="the interpreter is Triton's own"
    ),
]


@triton.jit
def _scaled(x, of: tl.constexpr):
    return x.to(of) * 3


@triton.jit
def _mix(x, limit):
    rows = _scaled(x, tl.float32)
    largest = tl.max(rows, 1)
    return tl.where(rows > limit, largest[:, None], tl.sigmoid(rows)) + tl.sum(rows)


@triton.jit
def _kernel(x, out, counts, limit, WIDTH: tl.constexpr):
    row = tl.program_id(0) * 2 + tl.arange(0, 2)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(x + at, mask=at % 5 != 1, other=0.5)
    for _ in tl.static_range(2):
        values = _mix(values, limit).to(tl.float16)
    tl.store(out + at, values)
    seed = (row.to(tl.uint32) * 0x9E3779B9).to(tl.int32, bitcast=True) ^ (row << 3)
    tl.store(counts + row, tl.sum((at.to(tl.int64) * seed[:, None]) % 77, 1).to(tl.int32))


def results() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(6, 16).half()
    out, counts = torch.empty_like(x), torch.empty(6, dtype=torch.int32)
    _kernel[(3,)](x, out, counts, 0.25, WIDTH=16)
    return out, counts


@pytest.fixture
def own_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, value in OWN:
        monkeypatch.setattr(owner, name, value)


def test_it_is_used_by_the_tests_of_kernels() -> None:
    assert all(getattr(owner, name) is used for owner, name, used in REPLACEMENTS)


def test_results_have_the_bits_of_tritons_own(request: pytest.FixtureRequest) -> None:
    quick = results()
    assert len(set(quick[1].tolist())) == 6
    request.getfixturevalue("own_interpreter")
    assert all(map(torch.equal, quick, results()))


@triton.jit
def _adds(x, y):
    return x + y


@triton.jit
def _wrong_kernel(out, WIDTH: tl.constexpr, OTHER: tl.constexpr):
    sums = _adds(tl.arange(0, WIDTH), tl.arange(0, OTHER))
    tl.store(out + tl.arange(0, WIDTH), sums)


@pytest.mark.parametrize(("width", "other"), [(16, 8), (12, 12)], ids=["shapes", "no power of two"])
@pytest.mark.parametrize("own", [False, True])
def test_a_kernel_that_cannot_be_fails(
    request: pytest.FixtureRequest, own: bool, width: int, other: int
) -> None:
    if own:
        request.getfixturevalue("own_interpreter")
    words = "power of" if width == other else "incompatible dimensions"
    with pytest.raises(interpreter.InterpreterError, match=words):
        _wrong_kernel[(1,)](torch.empty(16, dtype=torch.int32), WIDTH=width, OTHER=other)
    # The language is restored, so that the next launch can run.
    assert tl.core.is_builtin(tl.load)
