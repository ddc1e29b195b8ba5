"""The two backends offer the same operations."""

import subprocess
import sys

import pytest

from pagewire.worker.ops import Ops, load_ops


def test_backends_have_every_operation():
    for backend in ("torch", "triton"):
        ops = load_ops(backend)
        package = "reference" if backend == "torch" else "triton"
        for name in Ops.__slots__:
            function = getattr(ops, name)
            assert function.__name__ == name
            assert f".ops.{package}." in function.__module__


def test_the_torch_backend_does_not_import_triton():
    code = (
        "import sys; from pagewire.worker.ops import load_ops; load_ops('torch'); "
        "assert not any(m.startswith('pagewire.worker.ops.triton') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="'cuda'"):
        load_ops("cuda")
