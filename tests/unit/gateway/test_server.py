"""The gateway as a server: its addresses."""

import pytest

from pagewire.gateway.server import _listen


def test_an_address_that_cannot_be_used_is_named_with_its_flag() -> None:
    with (
        _listen("127.0.0.1", 0) as taken,
        pytest.raises(OSError, match=r"127\.0\.0\.1:\d+: .*; choose another --port$"),
    ):
        _listen("127.0.0.1", taken.getsockname()[1])
    for host in ("192.0.2.1", "999.1.1.1"):
        with pytest.raises(OSError, match=rf"{host}:8000: .*; choose another --host$"):
            _listen(host, 8000)
