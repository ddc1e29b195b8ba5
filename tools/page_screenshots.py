"""Takes the screenshots of docs/page.md from a running server, with its own load.

pagewire run --workers 2 --num-blocks 700 --playground
python tools/page_screenshots.py http://127.0.0.1:8000 docs/images
"""

import argparse
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

SYSTEM = "You answer in short sentences. " * 8


def load(url: str, seed: int, ended: threading.Event) -> None:
    """Sends one request after the other; groups of them share a beginning."""
    draw = random.Random(seed)
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    while not ended.is_set():
        text = SYSTEM + f"Team {seed % 3}. " * 20
        body: dict[str, Any] = {
            "model": model,
            "messages": [
                {"role": "system", "content": text},
                {"role": "user", "content": f"{draw.random()} " * draw.randrange(5, 40)},
            ],
            "max_tokens": draw.randrange(60, 300),
            "ignore_eos": True,
        }
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def open_page(browser: Browser, url: str, scheme: str, width: int, height: int) -> Page:
    """The page in a new browser profile."""
    context = browser.new_context(
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": width, "height": height},
    )
    page = context.new_page()
    page.goto(url)
    page.locator("#model option").first.wait_for(state="attached")
    return page


def chat(page: Page, file: Path) -> None:
    """An answer with the probabilities of a token."""
    for text in ("Who are you?", "What is a red fox?"):
        page.fill("#message", text)
        page.press("#message", "Enter")
        page.wait_for_selector("#send:not([hidden])", timeout=60_000)
    page.get_by_role("button", name="Try again").last.click()
    page.wait_for_selector("#send:not([hidden])", timeout=60_000)
    page.locator(".message.assistant").last.locator(".token").nth(3).hover()
    page.screenshot(path=file)


def kill(page: Page, file: Path) -> None:
    """A stream whose worker was just killed."""
    page.click("#show-settings")
    page.check("#set-ignore_eos")
    page.fill("#set-max_tokens", "400")
    page.click("#show-settings")
    page.fill("#message", "Tell me a story.")
    page.press("#message", "Enter")
    page.locator(".token").nth(60).wait_for(timeout=60_000)
    page.click("#kill")
    page.locator("#toast").wait_for()
    page.wait_for_timeout(700)
    page.screenshot(path=file)
    page.wait_for_selector("#send:not([hidden])", timeout=90_000)


def main() -> None:
    """Writes one PNG for each view."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()
    senders = [
        threading.Thread(target=load, args=(args.url, seed, ended), daemon=True)
        for seed in range(10)
    ]
    with sync_playwright() as driver:
        path = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        chat(open_page(browser, args.url, "light", 1200, 620), args.folder / "page-chat.png")
        chat(open_page(browser, args.url, "dark", 390, 720), args.folder / "page-phone.png")
        kill(open_page(browser, args.url, "dark", 1200, 560), args.folder / "page-kill.png")
        for sender in senders:
            sender.start()
        for scheme in ("light", "dark"):
            page = open_page(browser, f"{args.url}/#engine", scheme, 1200, 1180)
            page.wait_for_timeout(14_000)
            page.screenshot(path=args.folder / f"page-engine-{scheme}.png")
        ended.set()
        browser.close()


if __name__ == "__main__":
    main()
