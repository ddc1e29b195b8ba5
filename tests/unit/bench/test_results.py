"""Files of results say where they come from."""

import json
from pathlib import Path

from pagewire.bench.results import provenance, write_json


def test_results_say_where_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "results" / "r.json"
    write_json(file, {"ratio": 2.5})
    written = json.loads(file.read_text())
    assert written["ratio"] == 2.5
    assert written["versions"]["pagewire"] == provenance()["versions"]["pagewire"]
    assert written["machine"]["cores"] >= 1
