"""The form of log lines: text and JSON, dates, request ids, fields."""

import json
import logging
import re
from collections.abc import Iterator

import pytest

from pagewire.lifecycle import logs


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    """Restores the root logger after tests that configure it."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], level = before
    root.setLevel(level)
    logging.captureWarnings(False)
    logs.set_request_id("")


log = logging.getLogger("pagewire.test")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_text_lines_have_a_date_in_utc(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("gateway", "info")
    log.info("hello %d", 1)
    log.debug("not shown")
    [line] = lines(capsys)
    date = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{date} I gateway pagewire\.test: hello 1", line), line


def test_json_lines_hold_what_text_lines_do(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("worker", "info", "json")
    log.warning('a "quoted"\nline', extra=logs.fields(tokens=3, request_id="abc"))
    [line] = lines(capsys)
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found.pop("pid") > 0
    assert found == {
        "level": "warning",
        "service": "worker",
        "logger": "pagewire.test",
        "message": 'a "quoted"\nline',
        "tokens": 3,
        "request_id": "abc",
    }


def test_a_traceback_is_part_of_the_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("worker", "info", "json")
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("it failed")
    [line] = lines(capsys)
    assert "ValueError: wrong" in json.loads(line)["exception"]


def test_what_is_logged_for_a_request_names_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("gateway", "info")
    logs.set_request_id("r-7")
    log.info("parsed")
    log.info("request r-7 parsed")
    first, second = lines(capsys)
    assert first.endswith(": parsed (request r-7)")
    assert second.endswith(": request r-7 parsed")
    logs.configure("gateway", "info", "json")
    log.info("parsed")
    assert json.loads(lines(capsys)[0])["request_id"] == "r-7"


def test_warnings_are_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    import warnings

    logs.configure("worker", "info", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    [line] = lines(capsys)
    assert json.loads(line)["logger"] == "py.warnings"


def test_the_supervisor_of_a_stack_writes_json_too() -> None:
    found = json.loads(logs.json_line("pagewire", "worker-0 is ready again"))
    assert (found["service"], found["message"]) == ("pagewire", "worker-0 is ready again")
