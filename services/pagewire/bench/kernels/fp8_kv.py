"""The cases of a KV cache in FP8, derived from the cases that read or write a plain cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from pagewire.bench.kernels.cases import Case, CaseMaker
from pagewire.bench.kernels.shapes import Shapes, Sizes
from pagewire.worker.ops import Name
from pagewire.worker.ops.contract.blocks import KVScales

_SCALE_BYTES = 4  # of a vector


@dataclass(frozen=True, slots=True)
class Fp8KvCases:
    """Makes the cases of a model. Inputs are drawn when a case is made.

    All inputs of a case share the same scales: 3 % of the bytes, which may stay in the L2 cache.
    """

    shapes: Shapes
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    ops: Name = "triton"

    def all(self) -> Iterator[tuple[str, Callable[[], Case]]]:
        """Yield the name of each case and a function that makes it."""
        plain = CaseMaker(self.shapes, self.sizes, self.device, self.dtype, self.ops)
        for name, make in plain.all():
            if "KV write" in name:
                yield name.replace("KV write", "FP8 KV write"), partial(self._written, make)
            elif "attention" in name:
                yield name.replace("attention", "from FP8 KV"), partial(self._read, make)

    def _read(self, make: Callable[[], Case]) -> Case:
        """An attention case; its inputs begin with queries, keys and values."""
        case = make()
        caches = [
            (k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for _, k, v, *_ in case.inputs
        ]
        inputs = [
            (given[0], *cache, *given[3:]) for given, cache in zip(case.inputs, caches, strict=True)
        ]
        work = case.work
        if case.unit == "TB/s":
            others = 2 * inputs[0][0].nbytes  # queries and outputs
            vectors = (work - others) // (self.shapes.head_dim * self.dtype.itemsize)
            work = others + vectors * (self.shapes.head_dim + _SCALE_BYTES)
        options = {**case.options, "scales": self._scales(caches[0][0].shape)}
        return replace(case, work=work, inputs=inputs, options=options)

    def _written(self, make: Callable[[], Case]) -> Case:
        """The case of RoPE; its inputs end with keys and values."""
        case = make()
        shape = case.inputs[0][-1].shape
        inputs = [
            (*given[:-2], *torch.zeros((2, *shape), device=self.device).to(torch.float8_e4m3fn))
            for given in case.inputs
        ]
        vectors = 2 * self.sizes.tokens * self.shapes.kv_heads
        size = self.shapes.head_dim
        work = case.work - vectors * (size * (self.dtype.itemsize - 1) - _SCALE_BYTES)
        return replace(case, work=work, inputs=inputs, options={"scales": self._scales(shape)})

    def _scales(self, shape: tuple[int, ...]) -> KVScales:
        return KVScales(*torch.rand((2, *shape[:3]), device=self.device))
