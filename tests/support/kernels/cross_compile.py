"""Compile Triton kernels for Hopper on any machine, from the calls that launch them.

Inside `recorded_launches` an operation can be called with meta tensors. Each kernel launch is then
compiled for sm_90, with the constants, options and specialized arguments of the launch, and is not
executed. The process must not have TRITON_INTERPRET.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language import dtype
from triton.runtime.jit import JITFunction, mangle_type

HOPPER = GPUTarget("cuda", 90, 32)
_OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True, slots=True)
class Launch:
    """One compiled kernel. Sizes are bytes."""

    kernel: str
    ptx: str
    threads: int
    shared: int
    registers: int
    spilled: int
    serialized: bool  # the assembler lets no instructions of the tensor cores overlap
    neighbours: tuple[int, ...]  # each count of adjacent operand columns in one thread
    reduced: tuple[str, ...]  # the types of reduced tensors, whose layouts set the order of sums
    arrivals: tuple[str, ...]  # each value that chooses a barrier of several, where one arrives

    @property
    def resident(self) -> int:
        """Return how many programs run at once on a multiprocessor of Hopper."""
        registers = -(-self.registers // 8) * 8 * self.threads
        return min(65536 // registers, 228 * 1024 // (self.shared + 1024), 2048 // self.threads)

    def count(self, instruction: str) -> int:
        return self.ptx.count(instruction)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Compile the kernels that are launched inside for sm_90, instead of running them."""
    launches: list[Launch] = []

    def compile_launch(kernel: JITFunction, *args, grid, warmup, **kwargs) -> None:
        launches.append(_compile(kernel, args, kwargs))

    with patch.object(JITFunction, "run", compile_launch):
        yield launches


def counts_of_cases(
    cases: dict[str, tuple], count: Callable[[Launch], dict[str, Any]]
) -> dict[str, list[dict]]:
    """Compile the launches of each case, a function and its arguments.

    Returns, for each launch, the name of its kernel, its shared memory and spilled registers in
    bytes, and the counts that `count` adds.
    """
    found = {}
    for name, (function, *arguments) in cases.items():
        with recorded_launches() as launches:
            function(*arguments)
        found[name] = [
            {
                "kernel": launch.kernel,
                "shared": launch.shared,
                "spilled": launch.spilled,
                **count(launch),
            }
            for launch in launches
        ]
    return found


def _compile(kernel: JITFunction, args: tuple, kwargs: dict) -> Launch:
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    constexprs, signature, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constexprs[parameter.name] = value
            continue
        signature[parameter.name] = mangle_type(value)
        aligned = isinstance(value, int) and value % 16 == 0
        if hasattr(value, "data_ptr") or (aligned and not parameter.do_not_specialize):
            attributes[(index,)] = [["tt.divisibility", 16]]
    # A worker's compile pool receives constants as JSON.
    json.dumps([None if isinstance(value, dtype) else value for value in constexprs.values()])
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature, constexprs, attributes)
    # The usual cache may have kernels without a report: Triton 3.6 does not separate them.
    with (
        patch.object(knobs.cache, "dir", str(Path(knobs.cache.dir) / "reports")),
        patch.object(knobs.runtime, "add_stages_inspection_hook", keep_report),
    ):
        compiled = triton.compile(source, target=HOPPER, options=options)
    report = compiled.metadata.assembler_report
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    return Launch(
        kernel=kernel.__name__,
        ptx=compiled.asm["ptx"],
        threads=32 * compiled.metadata.num_warps,
        shared=compiled.metadata.shared,
        registers=registers,
        spilled=spilled,
        serialized="instructions are serialized" in report,
        neighbours=tuple(
            sorted({int(n) for n in re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"])})
        ),
        reduced=_reduced(compiled.asm["ttgir"]),
        arrivals=_arrivals(compiled.asm["ttgir"]),
    )


def _arrivals(ir: str) -> tuple[str, ...]:
    chosen: dict[str, str] = {}
    found: list[str] = []
    # Functions that the kernel contains inline may also be listed behind it.
    for line in ir.split("tt.func private")[0].splitlines():
        if match := re.match(r" *(%\w+) = ttg\.memdesc_index %\w+\[(%\w+(?:#\d+)?)\]", line):
            chosen[match[1]] = match[2]
        elif match := re.match(r" *ttng\.arrive_barrier (%\w+)", line):
            found.append(chosen.get(match[1], ""))
    return tuple(found)


def _reduced(ir: str) -> tuple[str, ...]:
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", ir, re.MULTILINE))
    types = re.findall(r"^ *}\) : \((.*)\) ->", ir, re.MULTILINE)
    return tuple(re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), t) for t in types)


def keep_report(*arguments: Any) -> tuple[str, str] | None:
    """Adds the assembler's report on the resources of a kernel to its metadata.

    Triton calls it with the stages of a compilation. Triton also calls it without arguments, for
    the key that separates such compilations from others in the cache.
    """
    if not arguments:
        return ("assembler report",) * 2
    stages = arguments[1]
    assemble = stages["cubin"]

    def assemble_and_keep(ptx: str, metadata: dict[str, Any]) -> bytes:
        report = io.StringIO()
        with patch.object(knobs.nvidia, "dump_ptxas_log", True), redirect_stdout(report):
            binary: bytes = assemble(ptx, metadata)
        metadata["assembler_report"] = report.getvalue()
        return binary

    stages["cubin"] = assemble_and_keep
    return None
