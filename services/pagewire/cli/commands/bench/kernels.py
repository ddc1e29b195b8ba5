"""`pagewire bench kernels`: each kernel on this machine's GPU, beside torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pagewire.bench.results import Figure, write_rows
from pagewire.cli.errors import CommandError

if TYPE_CHECKING:
    from pagewire.bench.kernels.measure import Result

_HEADER = (
    f"{'':58} {'us':>9} {'rate':>15} {'of ceiling':>10} {'over eager':>10} {'over compile':>12}"
)


def kernels(
    model: Annotated[
        str,
        typer.Option(
            help="Shapes of qwen3-0.6b, llama-3.1-8b or, for experts, qwen3-30b-a3b and "
            "gpt-oss-20b, or, for latent attention, deepseek-v2-lite and deepseek-v3."
        ),
    ] = "qwen3-0.6b",
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Leave out torch.compile, which takes minutes.")
    ] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Time the kernels of that mode of a worker.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="File for the figures, JSON lines.")] = None,
) -> None:
    """Time each Triton kernel beside its reference in eager torch and under torch.compile, in bf16.

    Kernels run in a CUDA graph over inputs larger than the L2 cache. The ceiling is the rate of a
    copy or of a GEMM on the same GPU. A reference that reads its inputs on the host runs without a
    graph and is not compiled ("-").
    """
    from pagewire.bench.kernels.shapes import EXPERT_MODELS, LATENT_MODELS, MODELS

    known = (*MODELS, *EXPERT_MODELS, *LATENT_MODELS)
    if model not in known:
        raise typer.BadParameter(
            f"{model!r} is none of the known shapes; give {', '.join(known[:-1])} or {known[-1]}",
            param_hint="--model",
        )
    if batch_invariant and model not in MODELS:
        raise typer.BadParameter(
            f"the mode does not take models with experts or latent attention, as {model}; leave it "
            "out",
            param_hint="--batch-invariant",
        )
    require_gpu()
    import torch

    from pagewire.bench.kernels.measure import bench_kernels, gpu_ceilings

    gpu, ceilings = gpu_ceilings()
    print(
        f"{gpu}, shapes of {model}: copies {ceilings.copy_tb_per_s:.2f} TB/s, "
        f"multiplies bf16 at {ceilings.matmul_tflop_per_s:.0f} TFLOP/s\n{_HEADER}",
        flush=True,
    )
    results = []
    ops: Literal["triton", "invariant"] = "invariant" if batch_invariant else "triton"
    for result in bench_kernels(model, not no_compile, ceilings, torch.device("cuda"), ops):
        print(line(result), flush=True)
        results.append(result)
    if output is not None:
        command = f"pagewire bench kernels --model {model}" + " --no-compile" * no_compile
        command += " --batch-invariant" * batch_invariant
        figures = [
            Figure(f"{model}/ceiling/copy", ceilings.copy_tb_per_s, "TB/s"),
            Figure(f"{model}/ceiling/matrix product", ceilings.matmul_tflop_per_s, "TFLOP/s"),
        ]
        for result in results:
            figures += figures_of_case(model + "/batch-invariant" * batch_invariant, result)
        write_rows(output, figures, command)
    failed = [result for result in results if result.error]
    if failed:
        raise CommandError(f"{len(failed)} of {len(results)} cases failed, see above")


def require_gpu() -> None:
    """CommandError if torch or triton is missing, or torch finds no NVIDIA GPU."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise CommandError(
            f"{error}: install the extra `worker`, pip install -e '.[worker]' in the repository"
        ) from error
    if not torch.cuda.is_available():
        raise CommandError(
            f"torch {torch.__version__} finds no NVIDIA GPU here; run this on a machine with one, "
            "with a CUDA build of torch"
        )


def line(result: "Result") -> str:
    """A row of the table, followed by the error if the case failed."""
    rate = None if result.rate is None else f"{result.rate:.2f} {result.unit}"
    eager = result.speedup_over(result.eager_microseconds)
    compiled = result.speedup_over(result.compiled_microseconds)
    text = (
        f"{result.name:58} {_shown(result.microseconds, '.1f'):>9} {rate or '-':>15} "
        f"{_shown(result.of_ceiling, '.0%'):>10} {_times(eager):>10} {_times(compiled):>12}"
    )
    return text if result.error is None else f"{text}\n  {result.error}"


def figures_of_case(model: str, result: "Result") -> Iterator[Figure]:
    """The measurements of a case, and its speed-ups."""
    found = {
        "microseconds": (result.microseconds, "us"),
        "rate": (result.rate, result.unit),
        "of_ceiling": (result.of_ceiling, "ratio"),
        "eager_microseconds": (result.eager_microseconds, "us"),
        "compiled_microseconds": (result.compiled_microseconds, "us"),
        "speedup_over_eager": (result.speedup_over(result.eager_microseconds), "ratio"),
        "speedup_over_compile": (result.speedup_over(result.compiled_microseconds), "ratio"),
    }
    for name, (value, unit) in found.items():
        if value is not None and unit is not None:
            yield Figure(f"{model}/{result.name}/{name}", value, unit)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}x"
