"""Prints the requirements in pyproject.toml for the given extras. An image installs them in a
separate layer, which stays valid while only the source changes."""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    chosen = [requirement for extra in sys.argv[1:] for requirement in extras[extra]]
    print("\n".join([*project["dependencies"], *chosen]))


if __name__ == "__main__":
    main()
