"""The file of requests of an offline benchmark."""

from pathlib import Path

import pytest

from pagewire.bench.offline import Request, read_requests
from pagewire.bench.speculative import read_texts
from pagewire.cli.errors import CommandError


def test_requests_are_read_and_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"prompt_token_ids": [1, 2], "max_tokens": 3}\n\n')
    assert read_requests(file) == [Request([1, 2], 3)]
    file.write_text('{"prompt_token_ids": [1, 2], "max_tokens": 3}\n{"prompt": "x"}\n')
    with pytest.raises(CommandError, match="line 2"):
        read_requests(file)
    file.write_text("\n")
    with pytest.raises(CommandError, match="holds no request"):
        read_requests(file)


def test_files_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(CommandError, match=r"--requests .*r\.jsonl: is not UTF-8 text"):
        read_requests(file)
    with pytest.raises(CommandError, match=r"--replay .*r\.jsonl: is not UTF-8 text"):
        read_texts(file, "embedded", None)
