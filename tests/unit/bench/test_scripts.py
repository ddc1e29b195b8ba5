"""Scripts in benchmarks/ find their imports when they run as in their docstrings."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = [
    path
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]
# Folders that are packages when Python runs with -m at the root.
PACKAGES = {"benchmarks", "tools", "tests"}


def imported(tree: ast.Module) -> set[str]:
    """The first names of the modules that a script imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_run_as_they_say(path: Path) -> None:
    tree = ast.parse(path.read_text())
    name = path.relative_to(ROOT)
    module = ".".join(name.with_suffix("").parts)
    docstring = ast.get_docstring(tree) or ""
    command = re.search(rf"python3? (-m {re.escape(module)}|{re.escape(str(name))})\b", docstring)
    assert command is not None, f"the docstring of {name} does not say how to run it"
    beside = {other.stem for other in path.parent.glob("*.py")}
    others = {other.stem for other in SCRIPTS} - beside
    unreachable = others | beside if command[1].startswith("-m") else others | PACKAGES
    assert imported(tree) & unreachable == set()
