"""Prints the imports between rooms, and fails if a room is too full or imports form a circle.

A room is a folder of modules. A module at the root of a service, such as `server.py`, is a separate
room: it either combines the rooms or all rooms use it. Rooms are printed from the top down, so that
every import leads downwards.
"""

import ast
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOTS = (Path("services"), Path("shared"))
MAX_FILES = 16  # about fifteen modules and the package's docstring
# Folders whose own modules are rooms: the services, and their shared code.
OPEN_FOLDERS = {
    "pagewire",
    "pagewire.cli",
    "pagewire.gateway",
    "pagewire.scheduler",
    "pagewire.scheduler.core",
    "pagewire.worker",
    "pagewire.worker.ops",
    "pagewire.worker.protocol",
}


def main() -> int:
    """Print the graph; 1 if a folder is too full or rooms import each other in a circle."""
    modules = {name: path for root in ROOTS for name, path in modules_of(root)}
    imports: dict[str, set[str]] = defaultdict(set)
    sizes: dict[str, int] = defaultdict(int)
    for name, path in modules.items():
        sizes[room_of(name, modules)] += 1
        for imported in imported_modules(path, modules):
            above, below = room_of(name, modules), room_of(imported, modules)
            if above != below:
                imports[above].add(below)
    full = [f for f, count in python_files().items() if count > MAX_FILES]
    for folder in full:
        print(f"{folder} has more than {MAX_FILES} files")
    try:
        order = list(TopologicalSorter({room: imports[room] for room in sizes}).static_order())
    except CycleError as error:
        print("rooms import each other in a circle:", " -> ".join(error.args[1]))
        return 1
    for room in reversed(order):
        below = ", ".join(short(name) for name in sorted(imports[room])) or "-"
        print(f"{short(room)} ({sizes[room]}): {below}")
    return 1 if full else 0


def modules_of(root: Path) -> list[tuple[str, Path]]:
    """Every module under a root, by its dotted name; generated code is left out."""
    paths = [path for path in root.rglob("*.py") if "_pb2" not in path.name]
    return [(dotted(path.relative_to(root)), path) for path in sorted(paths)]


def dotted(path: Path) -> str:
    """The name under which a file is imported."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str, modules: dict[str, Path]) -> str:
    """The room of a module."""
    if module not in modules or modules[module].name == "__init__.py":
        return module
    folder = module.rpartition(".")[0]
    return module if folder in OPEN_FOLDERS else folder


def imported_modules(path: Path, modules: dict[str, Path]) -> set[str]:
    """The project's modules that a file imports, in its functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in whole]
        else:
            continue
        found.update(name for name in names if name in modules)
    return found


def python_files() -> dict[Path, int]:
    """How many Python files lie in each folder, tests and tools included."""
    counts: dict[Path, int] = defaultdict(int)
    for root in (*ROOTS, Path("tests"), Path("tools"), Path("benchmarks")):
        for path in root.rglob("*.py"):
            counts[path.parent] += "_pb2" not in path.name
    return counts


def short(room: str) -> str:
    """A room's name without the top package."""
    return room.removeprefix("pagewire.")


if __name__ == "__main__":
    sys.exit(main())
