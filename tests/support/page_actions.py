"""Actions of a visitor on the page of a gateway."""

from playwright.sync_api import Page

ANSWER = ".message.assistant"


def set_field(page: Page, name: str, value: str | bool) -> None:
    """Sets a field of the settings."""
    if page.locator("#settings").is_hidden():
        page.click("#show-settings")
    if isinstance(value, bool):
        page.set_checked(f"#set-{name}", value)
    elif name == "format":
        page.select_option("#set-format", value)
    else:
        page.fill(f"#set-{name}", value)


def begin(page: Page, text: str) -> None:
    """Sends a message. The page waits for its answer when this returns."""
    page.fill("#message", text)
    page.press("#message", "Enter")


def finish(page: Page) -> None:
    """Waits for the end of the answer."""
    page.wait_for_selector("#send:not([hidden])", timeout=150_000)


def ask(page: Page, text: str) -> str:
    """Sends a message; returns its whole answer."""
    begin(page, text)
    finish(page)
    return last_answer(page)


def last_answer(page: Page) -> str:
    """The text of the last answer, as the page stores it."""
    return str(
        page.evaluate(
            """() => {
              const key = Object.keys(localStorage).find((k) => k.includes("conversation"));
              const { nodes, chosen } = JSON.parse(localStorage.getItem(key));
              let last = null;
              for (let id = chosen[""]; id; id = chosen[id]) last = nodes[id];
              return last.content;
            }"""
        )
    )
