"""Paths, tests and flags in the documentation exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from pagewire.config import GatewayConfig, SchedulerConfig, SimulatedWorkerConfig, WorkerConfig

ROOT = Path(__file__).parents[3]
# Where a path in prose may begin.
BASES = (
    ROOT,
    ROOT / "services/pagewire",
    ROOT / "shared/pagewire",
    *ROOT.glob("services/pagewire/*/"),
)
PAGES = sorted(
    page
    for folder in (ROOT, ROOT / "docs", ROOT / "docs/decisions")
    for page in folder.glob("*.md")
)
# Routes and fields that look like files.
NO_FILES = frozenset(
    {
        "/openapi.json",
        "structured_outputs.json",
        # Files of sentence-transformers in a model's folder.
        "1_Pooling/config.json",
        "modules.json",
        "sentence_bert_config.json",
    }
)
# Settings of commands that are not services, and of pytest.
OTHER_FLAGS = frozenset(
    {"calibrate", "config", "factor", "operator", "output", "playground", "trace"}
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    named = re.findall(
        r"`(?!/)([\w./-]+(?:\.(?:py|json|proto|toml|yml|yaml|svg|md)|/))`", page.read_text()
    )
    files = [name for name in named if name not in NO_FILES]
    missing = [name for name in files if not any((base / name).exists() for base in BASES)]
    bare = [name for name in missing if "/" not in name and any(ROOT.glob(f"[!.]*/**/{name}"))]
    assert sorted(set(missing) - set(bare)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_exist(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert {name for name in named if f"def {name}(" not in source and name not in files} == set()


def test_flags_of_services_exist() -> None:
    settings = {
        field.name.replace("_", "-")
        for config in (GatewayConfig, SchedulerConfig, WorkerConfig, SimulatedWorkerConfig)
        for field in fields(config)
    }
    settings |= {f"no-{name}" for name in settings} | OTHER_FLAGS
    for page in (ROOT / "docs").glob("*.md"):
        named = set(re.findall(r"`--([a-z][a-z-]*[a-z])(?![a-z-])", page.read_text()))
        assert named - settings == set(), page.name
