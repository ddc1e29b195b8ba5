"""API keys of the environment."""

import pytest

from pagewire.auth.keys import KEYS_VARIABLE, new_key, read_keys


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
