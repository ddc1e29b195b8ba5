"""All implementations offer the operations of the contract, with its signatures."""

import inspect
import subprocess
import sys

import pytest

from pagewire.worker.ops import Ops, load_ops

OPERATIONS = [name for name in dir(Ops) if not name.startswith("_")]


def test_the_contract_has_operations():
    assert {"rms_norm", "linear", "decode_attention", "sample", "copy_blocks"} < {*OPERATIONS}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("ops", ["torch", "triton", "invariant"])
def test_implementations_have_every_operation(ops, name):
    function = getattr(load_ops(ops), name)
    package = "reference" if ops == "torch" else "triton"
    assert function.__name__ == name
    assert f".ops.{package}." in function.__module__


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("ops", ["torch", "triton", "invariant"])
def test_arguments_have_the_names_and_defaults_of_the_contract(ops, name):
    """mypy compares types; it does not compare the names of positional arguments."""
    _, *expected = inspect.signature(getattr(Ops, name)).parameters.values()
    given = inspect.signature(getattr(load_ops(ops), name)).parameters
    for parameter in expected:
        found = given[parameter.name]
        assert (found.kind, found.default) == (parameter.kind, parameter.default), parameter.name
    positional = [p.name for p in given.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert positional == [p.name for p in expected if p.kind == p.POSITIONAL_OR_KEYWORD]
    more = given.keys() - {parameter.name for parameter in expected}
    assert all(given[extra].default is not inspect.Parameter.empty for extra in more)


def test_the_torch_operations_do_not_import_triton():
    code = (
        "import sys; from pagewire.worker.ops import load_ops; load_ops('torch'); "
        "assert not any(m.startswith('pagewire.worker.ops.triton') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_operations_are_refused():
    with pytest.raises(ValueError, match="'cuda'"):
        load_ops("cuda")
