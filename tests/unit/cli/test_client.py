"""The client of the OpenAI-style API, with servers of other kinds."""

import http.server
import threading
from collections.abc import Iterator

import pytest

from pagewire.cli.client import first_model, served_models
from pagewire.cli.errors import CommandError
from pagewire.cli.launch.health import health_problem


class Page(http.server.BaseHTTPRequestHandler):
    """Answers every request with `content`."""

    content = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that answers with the test's bytes."""
    handler = type("Handler", (Page,), {"content": request.param})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("url", [b"<html></html>", b"[]", b'{"data": 1}', b"{}"], indirect=True)
async def test_a_server_of_another_kind_is_named(url: str) -> None:
    with pytest.raises(CommandError, match=f"{url}/v1/models is not a list of models"):
        await served_models(url)


@pytest.mark.parametrize("url", [b'{"data": [{"id": "a"}, {"id": "b"}]}'], indirect=True)
async def test_the_first_model_is_taken(url: str) -> None:
    assert await served_models(f"{url}/") == ["a", "b"]
    assert await first_model(url) == "a"


@pytest.mark.parametrize("url", [b'{"data": []}'], indirect=True)
async def test_a_server_without_models_is_named(url: str) -> None:
    with pytest.raises(CommandError, match=f"the server at {url} serves no model yet"):
        await first_model(url)


async def test_without_a_server_there_are_no_models() -> None:
    assert await served_models("http://127.0.0.1:9") is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "127.0.0.1:x", "http://[::1"])
async def test_a_wrong_url_is_named(url: str) -> None:
    with pytest.raises(CommandError) as caught:
        await served_models(url)
    assert str(caught.value).startswith(f"{url} is not the URL of a server: ")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("http://[::1", "it is not a URL: Invalid IPv6 URL"),
        # Sockets would use the port 34463 instead.
        ("http://127.0.0.1:99999", "it is not a URL: Port out of range 0-65535"),
        ("127.0.0.1:99999", "it is neither host:port nor unix:PATH nor an HTTP URL"),
        ("127.0.0.1", "it is neither host:port nor unix:PATH nor an HTTP URL"),
        ("", "it is neither host:port nor unix:PATH nor an HTTP URL"),
    ],
)
async def test_a_wrong_address_is_not_healthy(address: str, problem: str) -> None:
    assert await health_problem(address) == problem
