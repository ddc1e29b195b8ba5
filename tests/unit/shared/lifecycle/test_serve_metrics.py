"""The endpoint of metrics: errors when it cannot listen."""

import re
import socket

import pytest
from prometheus_client import CollectorRegistry

from pagewire.lifecycle.metrics import serve_metrics


def test_an_address_that_cannot_be_used_is_named_with_what_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"cannot serve metrics on 127.0.0.1:{port}: Address already in use; choose "
        with pytest.raises(OSError, match=f"^{message}another port of metrics$"):
            serve_metrics("127.0.0.1", port, CollectorRegistry())
    for host in ("192.0.2.1", "999.1.1.1"):
        with pytest.raises(OSError, match=rf"{re.escape(host)}:8000: .*; choose .* --metrics-host"):
            serve_metrics(host, 8000, CollectorRegistry())
