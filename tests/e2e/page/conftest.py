"""A real browser, and the page of a real stack in it."""

import os
import shutil
from collections.abc import Iterator

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright  # noqa: E402

from support.processes.stack_process import RunningStack, running_stack  # noqa: E402

# Distributions' names of Chromium. Playwright's own browsers come from its own servers, so they
# are not used.
_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    # Chromium's sandbox does not work for root.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def stack() -> Iterator[RunningStack]:
    """`pagewire run` with the embedded model and a playground. A test may kill its worker."""
    # On a busy machine a worker may start more slowly than requests wait by default.
    with running_stack("--playground", "--resume-timeout", "120") as started:
        yield started


@pytest.fixture
def page(browser: Browser, stack: RunningStack) -> Iterator[Page]:
    """The page as a new visitor sees it. An error in its scripts fails the test."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if _is_fault(line) else None)
    page.goto(stack.url)
    page.locator("#model option").first.wait_for(state="attached")
    yield page
    context.close()
    assert errors == []


def _is_fault(line: ConsoleMessage) -> bool:
    """Whether the line is an error of the page: Chromium also logs answers such as 400."""
    return line.type == "error" and not line.text.startswith("Failed to load resource")
