"""JSON files of a model; errors name the path and the line."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The value in a file; ValueError names the file, the line and the error.

    OSError if the file cannot be opened.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        what = f"line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}"
        raise ValueError(f"{path} cannot be read: {what}") from error
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text: {error.reason} at byte {error.start}"
        raise ValueError(f"{path} cannot be read: {what}") from error
    except ValueError as error:  # of a number with thousands of digits
        raise ValueError(f"{path} cannot be read: a number has too many digits") from error
    except RecursionError as error:
        raise ValueError(f"{path} cannot be read: its values are nested too deeply") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file, with the errors of `read_json`."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} cannot be read: it is not a JSON object, but a {type(content).__name__}"
        )
    return content


def line_of(path: Path, key: str) -> int | None:
    """The line of a key in a file; None if the file does not have it."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if f'"{key}"' in line:
            return number
    return None
