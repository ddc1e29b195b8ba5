"""Reading traces: both formats, tokens by hash ids, errors that name the request."""

from pathlib import Path

import numpy as np
import pytest

from pagewire.simulator.trace import TraceRequest, ideal_block_hit_rate, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
"""
MOONCAKE = """
{"timestamp": 27000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}
{"timestamp": 30000, "input_length": 1024, "output_length": 6, "hash_ids": [0, 9]}
{"timestamp": 30500, "input_length": 1025, "output_length": 6, "hash_ids": [0, 9, 3]}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_azure_requests_come_in_order_and_share_nothing(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, "a.csv", AZURE))
    assert (first.input_length, first.output_length, first.arrival) == (374, 44, 0.0)
    assert second.arrival == pytest.approx(4.314579)
    assert len(first.prompt()) == 374
    assert first.prompt()[0] != second.prompt()[0]
    assert ideal_block_hit_rate([first, second]) is None


def test_equal_hash_ids_are_equal_tokens(tmp_path: Path) -> None:
    a, b, c = (r.prompt() for r in read_trace(write(tmp_path, "m.jsonl", MOONCAKE)))
    assert [len(a), len(b), len(c)] == [600, 1024, 1025]
    assert (a[:512] == b[:512]).all()
    assert (b == c[:1024]).all()
    assert not set(a[512:].tolist()) & set(b[512:].tolist())
    assert len(np.unique(c)) == 1025


def test_arrivals_are_seconds_after_the_first(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path, "m.jsonl", MOONCAKE))
    assert [r.arrival for r in requests] == [0.0, 3.0, 3.5]
    assert [r.number for r in requests] == [0, 1, 2]
    assert ideal_block_hit_rate(requests) == pytest.approx(3 / 7)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,5\n", "request 1 is invalid: KeyE"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,5,0\n", "request 3 .* at least one token in"),
        ("a.csv", AZURE.splitlines()[0], "holds no request"),
        ("m.jsonl", MOONCAKE.replace("600", "500"), "request 1 .*2 hash_ids for 500 tokens"),
        ("m.jsonl", MOONCAKE.replace("7]", "4194303]"), "request 1 .*hash_ids must be 0 to"),
        ("m.jsonl", "{}", "request 1 is invalid"),
        ("m.jsonl", MOONCAKE.replace("30000", "NaN"), "must be a finite"),
        ("m.jsonl", MOONCAKE.replace("30000", "1e999"), "must be a finite"),
        ("m.jsonl", MOONCAKE.replace("600", "1e999"), "request 1 is invalid: Overf"),
    ],
)
def test_an_invalid_trace_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_trace(write(tmp_path, name, text))


def test_the_largest_hash_id_has_tokens_in_range() -> None:
    request = TraceRequest(0, 0.0, 512, 1, (4194302,))
    assert 0 < request.prompt().min() <= request.prompt().max() < 2**31
