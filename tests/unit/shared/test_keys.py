"""API keys and tokens of the environment and of files."""

from pathlib import Path

import pytest

from pagewire.auth.keys import KEYS_VARIABLE, new_key, read_keys
from pagewire.rpc.credentials import read_token


def test_a_key_may_have_a_name() -> None:
    key = new_key()
    ring = read_keys(None, f"ada={key}")
    assert ring is not None
    assert ring.names == {"ada"}


@pytest.mark.parametrize("name", ["", "a\nb"])
def test_a_key_with_an_empty_or_unprintable_name_is_refused(name: str) -> None:
    key = new_key()
    with pytest.raises(
        ValueError, match=f"the key 2 of {KEYS_VARIABLE} has no printable name"
    ) as e:
        read_keys(None, f"ada={new_key()},{name}={key}")
    assert key not in str(e.value)


def test_files_that_cannot_be_read_are_named_with_what_they_are(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    with pytest.raises(ValueError, match=f"^--api-keys-file {absent} cannot be read: No such file"):
        read_keys(absent, "")
    with pytest.raises(ValueError, match=f"^the token file {absent} cannot be read: No such file"):
        read_token(absent, "UNSET")


def test_key_files_that_are_not_text_or_nested_too_deeply_are_named(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_bytes(b"\xff- secret")
    with pytest.raises(ValueError, match=f"^--api-keys-file {file} is not a text in UTF-8$"):
        read_keys(str(file), "")
    file.write_text("[" * 3000)
    with pytest.raises(ValueError, match=f"^{file}: its lists are nested too deeply$"):
        read_keys(str(file), "")
