"""docs/models.md lists the families of the table; each is compared with transformers."""

import re
from pathlib import Path

from pagewire.worker.model.config import FAMILIES
from support.models.tiny_models import VARIANTS, VISION_VARIANTS

PAGE = Path(__file__).parents[4] / "docs" / "models.md"


def test_the_page_lists_every_family_once() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    listed = [name for row in rows for name in re.findall(r"`(\w+For\w+)`", row)]
    assert sorted(listed) == sorted(family.architecture for family in FAMILIES)


def test_every_family_has_a_parity_test() -> None:
    compared = {model_type for model_type, _ in VARIANTS.values()} | VISION_VARIANTS.keys()
    assert {family.model_type for family in FAMILIES} == compared


def test_the_example_is_the_row_of_the_table() -> None:
    page, spaces = PAGE.read_text(), re.compile(r"\s+")
    rows, variants = (
        spaces.sub("", Path(PAGE.parents[1], path).read_text())
        for path in (
            "services/pagewire/worker/model/config/families.py",
            "tests/support/models/tiny_models.py",
        )
    )
    row, variant = (spaces.sub("", code) for code in re.findall(r"```python\n(.*?)```", page, re.S))
    assert row in rows
    assert variant in variants
