"""The cases of `pagewire bench kernels` in small sizes, and the table of results."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

from pagewire.bench.kernels import measure as timed
from pagewire.bench.kernels.cases import Case, CaseMaker
from pagewire.bench.kernels.fp8_kv import Fp8KvCases
from pagewire.bench.kernels.measure import Result, measure
from pagewire.bench.kernels.quantized import QuantizedCases
from pagewire.bench.kernels.shapes import MODELS, Shapes, SharedPrefix, Sizes
from pagewire.bench.kernels.timing import Ceilings
from pagewire.cli.commands.bench.kernels import figures_of_case, line
from pagewire.worker.ops import load_ops
from pagewire.worker.ops.contract.quantized import QuantizedInput
from support.kernels.comparison import CUDA, FP8_SUM, assert_near

SHAPES = Shapes(64, 4, 2, 32, 96, 500, qk_norm=True)
SIZES = Sizes(
    tokens=5,
    decode=((2, 40), (1, 70)),
    shared_prefix=SharedPrefix(groups=2, shared=64, rows=5, own=16),
    prefill=((1, 20), (2, 17)),
    sampled_rows=1,
    linear_tokens=(1, 8),
    rotated_bytes=0,
)
DEVICE = torch.device("cuda" if CUDA else "cpu")
MAKERS = (CaseMaker, Fp8KvCases, QuantizedCases)
CASES = {
    name: make
    for maker in MAKERS
    for name, make in maker(SHAPES, SIZES, DEVICE, torch.float32).all()
}
INVARIANT = {
    name: make
    for maker in (CaseMaker, Fp8KvCases)
    for name, make in maker(SHAPES, SIZES, DEVICE, torch.float32, "invariant").all()
}
CEILINGS = Ceilings(copy_tb_per_s=4.0, matmul_tflop_per_s=800.0)


@pytest.mark.parametrize("name", CASES)
def test_a_case_runs_and_computes_the_reference(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    assert case.work > 0
    assert len(case.inputs) == 2
    assert any(one is not other for one, other in zip(*case.inputs, strict=True))
    references = copy.deepcopy(case).calls(load_ops("torch"))
    on_tensor_cores = name.startswith("gate/up in FP8") and not name.endswith("tokens: 1")
    bound = max(FP8_SUM, 1e-5) if on_tensor_cores else 1e-5
    for kernel, reference in zip(case.calls(load_ops("triton")), references, strict=True):
        assert_near(numbers(kernel()), numbers(reference()), bound)


def numbers(result: torch.Tensor | QuantizedInput) -> torch.Tensor:
    """A result, dequantized if necessary."""
    if isinstance(result, torch.Tensor):
        return result
    return result.values.float() * result.scales


@pytest.mark.parametrize("name", INVARIANT)
def test_a_case_of_the_invariant_kernels_computes_the_reference(name: str) -> None:
    torch.manual_seed(0)
    case = INVARIANT[name]()
    references = copy.deepcopy(case).calls(load_ops("torch"))
    for kernel, reference in zip(case.calls(load_ops("invariant")), references, strict=True):
        # Weights of attention are rounded to multiples of 2^-17.
        assert_near(
            kernel(), reference(), 2e-5 if "attention" in name or "from FP8" in name else 1e-5
        )


def test_work_counts_each_byte_and_operation_once() -> None:
    work = {name: CASES[name]().work for name in CASES}
    assert work["RMSNorm, 5 tokens"] == 2 * 5 * 64 * 4
    assert work["SiLU*mul, 5 tokens"] == 5 * (2 * 96 + 96) * 4
    query = 4 * 32 * 4
    assert work["decode attention, 1 x 70"] == 2 * 70 * 2 * 32 * 4 + 2 * query
    assert work["decode from FP8 KV, 1 x 70"] == 2 * 70 * 2 * (32 + 4) + 2 * query
    rope = work["QK-norm + RoPE + KV write, 5 tokens"]
    assert work["QK-norm + RoPE + FP8 KV write, 5 tokens"] == rope - 5 * 4 * (4 * 32 - 36)
    shared = work["decode attention, 5 rows in 2 groups of 64, 16 own"]
    assert shared == 2 * (2 * 64 + 5 * 16) * 2 * 32 * 4 + 2 * 5 * query
    assert work["prefill attention, 1 x 20"] == 4 * 210 * 4 * 32
    assert work["norm + gate/up + SiLU*mul, tokens: 8"] == 2 * 96 * 64 * 4
    assert work["RMSNorm + FP8, 5 tokens"] == 5 * 64 * (4 + 1)
    assert work["SiLU*mul + FP8, 5 tokens"] == 5 * 96 * (2 * 4 + 1)
    assert work["gate/up in FP8, tokens: 8"] == 2 * 96 * (64 + 4)
    assert work["gate/up in INT8, tokens: 5"] == 2 * 5 * 64 * 2 * 96


def test_inputs_outgrow_the_cache() -> None:
    sizes = Sizes(tokens=5, rotated_bytes=20 * 5 * 64 * 4)
    inputs = CaseMaker(SHAPES, sizes, DEVICE, torch.float32).rms_norm().inputs
    assert len({x.data_ptr() for x, *_ in inputs}) == 20


def test_every_model_has_a_case_of_each_kernel() -> None:
    for shapes in MODELS.values():
        names = [name for maker in MAKERS for name, _ in maker(shapes, Sizes(), DEVICE).all()]
        assert len(set(names)) == 20 + 9 + 22
        assert max(map(len, names)) <= 58, "the table's first column"


def test_references_that_read_on_the_host_are_neither_captured_nor_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = []
    monkeypatch.setattr(timed, "graph_us", lambda calls: 2.0 if calls[0]() is not None else 0)
    monkeypatch.setattr(timed, "stream_us", lambda calls: 50.0 if calls[0]() is not None else 0)
    monkeypatch.setattr(torch, "compile", lambda op, dynamic: compiled.append(op) or op)

    norm = measure("norm", CASES["RMSNorm, 5 tokens"], True, CEILINGS)
    assert (norm.microseconds, norm.eager_microseconds, norm.compiled_microseconds) == (2, 2, 2)
    assert norm.rate == pytest.approx(2560 / 2e-6 / 1e12)
    assert norm.of_ceiling == pytest.approx(norm.rate / 4.0)
    prefill = measure("prefill", CASES["prefill attention, 1 x 20"], True, CEILINGS)
    assert (prefill.microseconds, prefill.eager_microseconds) == (2, 50)
    assert prefill.of_ceiling == pytest.approx(4 * 210 * 128 / 2e-6 / 1e12 / 800)
    assert prefill.compiled_microseconds is None
    assert compiled == [load_ops("torch").rms_norm]


@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_timed(name: str) -> None:
    result = measure(name, CASES[name], False, CEILINGS)
    assert result.error is None
    assert result.microseconds > 0
    assert result.eager_microseconds > 0


def test_a_case_that_fails_says_why() -> None:
    def make() -> Case:
        raise ValueError("no such shape,\n nowhere")

    result = measure("broken", make, True, CEILINGS)
    assert result == Result("broken", error="ValueError: no such shape, nowhere")
    assert line(result).endswith("\n  ValueError: no such shape, nowhere")


def test_a_row_of_the_table() -> None:
    result = Result("norm", "TB/s", 10, 2.0, 3.0, 0.75, eager_microseconds=11.0)
    assert line(result).split() == ["norm", "2.0", "3.00", "TB/s", "75%", "5.5x", "-"]
    written = {figure.name: figure for figure in figures_of_case("tiny", result)}
    assert written["tiny/norm/speedup_over_eager"].value == 5.5
    assert "tiny/norm/speedup_over_compile" not in written
    assert written["tiny/norm/rate"].unit == "TB/s"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagewire.cli.main", "bench", "kernels", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.skipif(CUDA, reason="there is a GPU")
def test_without_a_gpu_the_command_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "finds no NVIDIA GPU" in done.stderr


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3"])
def test_the_mode_of_one_answer_has_no_cases_that_it_refuses(model: str) -> None:
    done = run("--model", model, "--batch-invariant")
    assert done.returncode == 2
    message = f"the mode does not take models with experts or latent attention, as {model}"
    assert message in " ".join(done.stderr.split())


def test_unknown_shapes_are_refused() -> None:
    done = run("--model", "gpt-2")
    assert done.returncode == 2
    known = "qwen3-0.6b, llama-3.1-8b, qwen3-30b-a3b, gpt-oss-20b, deepseek-v2-lite or deepseek-v3"
    message = f"'gpt-2' is none of the known shapes; give {known}"
    assert message in " ".join(done.stderr.split())
