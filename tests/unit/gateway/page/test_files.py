"""The files of the page: what a browser gets, and what the page may do there."""

import re
from importlib.resources import files

import httpx
import pytest

from pagewire.gateway.http.app import Gateway, create_app
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.page.files import FOLDER, MAX_BYTES, page_files
from pagewire.gateway.routing.schedulers import Schedulers

ASSETS = files("pagewire.gateway.page") / "assets"
SOURCES = {file.name: file.read_text() for file in ASSETS.iterdir()}
SCRIPTS = {name: text for name, text in SOURCES.items() if name.endswith(".js")}


async def get(path: str, page: bool = True, **headers: str) -> httpx.Response:
    metrics = GatewayMetrics()
    gateway = Gateway(Schedulers([], metrics), metrics, 1000, 10, page=page)
    transport = httpx.ASGITransport(create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.get(path, headers=headers)


async def test_every_file_is_served_with_a_strict_policy() -> None:
    for path in page_files():
        answer = await get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert (await get("/")).headers["content-type"] == "text/html; charset=utf-8"
    assert (await get(f"{FOLDER}/main.js")).headers["content-type"].startswith("text/javascript")


async def test_the_page_can_be_turned_off() -> None:
    for path in ("/", f"{FOLDER}/main.js"):
        assert (await get(path, page=False)).status_code == 404
    assert (await get(f"{FOLDER}/../files.py")).status_code == 404


async def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    tag = (await get("/")).headers["etag"]
    again = await get("/", **{"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_is_small() -> None:
    assert sum(len(text.encode()) for text in SOURCES.values()) <= MAX_BYTES


def test_the_page_needs_no_other_server() -> None:
    for name, text in SOURCES.items():
        found = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"']*", text))
        assert found <= {"http://www.w3.org/2000/svg"}, name


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r'"page/([\w.-]+)"', SOURCES["index.html"]))
    for text in SCRIPTS.values():
        named |= set(re.findall(r'from "\./([\w.-]+)"', text))
    assert named | {"index.html"} == SOURCES.keys()


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_no_text_becomes_markup_or_code(name: str) -> None:
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "srcdoc",
        "javascript:",
    ):
        assert sink not in SCRIPTS[name]


def test_every_field_of_the_page_has_a_label() -> None:
    html = SOURCES["index.html"]
    for tag in re.findall(r"<(?:input|select|textarea)[^>]*>", html):
        [name] = re.findall(r'id="([\w-]+)"', tag)
        wrapped = re.search(rf'<label[^>]*>(?:(?!</label>).)*id="{name}"', html, re.DOTALL)
        assert wrapped or f'for="{name}"' in html, tag
