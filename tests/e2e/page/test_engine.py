"""The engine's view in a real Chromium, against a real stack."""

import os
import time

import httpx
import pytest
from playwright.sync_api import Page, expect

from support.page_actions import begin, finish, set_field
from support.processes.stack_process import RunningStack

TICK = 20_000  # milliseconds to wait for a change that a tick of a second brings


def open_engine(page: Page) -> None:
    page.click("#to-engine")
    expect(page.locator(".worker .pill")).to_have_text("ready", timeout=TICK)


def test_the_map_changes_while_a_request_runs(page: Page) -> None:
    secret = "zebra crossing"
    set_field(page, "ignore_eos", True)
    set_field(page, "max_tokens", "1500")
    begin(page, f"Tell me about the {secret}.")
    open_engine(page)
    counts = page.locator(".worker .counts").first
    row = page.locator(".requests tbody tr")
    expect(row).to_have_count(1, timeout=TICK)
    expect(row.locator(".phase")).to_have_text("decode", timeout=TICK)
    expect(counts).not_to_contain_text(" 0 held", timeout=TICK)
    before = counts.inner_text()
    expect(counts).not_to_have_text(before, timeout=TICK)  # it grows block by block
    expect(page.locator(".topology")).to_contain_text("1 running")
    expect(page.locator(".worker .timeline")).not_to_have_attribute(
        "aria-label", "Steps of the last 10 seconds: none in the last 10 s", timeout=TICK
    )
    assert secret not in page.locator("#engine-view").inner_text()
    page.click("#to-chat")
    page.keyboard.press("Escape")
    finish(page)
    page.click("#to-engine")
    expect(row).to_have_count(0, timeout=TICK)
    expect(counts).to_contain_text(" 0 held", timeout=TICK)
    expect(page.locator(".prefixes li").first).to_contain_text("tokens", timeout=TICK)


def test_it_is_watched_only_while_it_is_on_the_screen(page: Page) -> None:
    requests: list[str] = []
    ended: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("requestfailed", lambda request: ended.append(request.url))
    open_engine(page)
    assert sum("engine/events" in url for url in requests) == 1
    page.click("#to-chat")
    page.wait_for_timeout(500)
    assert sum("engine/events" in url for url in ended) == 1


def _cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_ten_viewers_cost_next_to_nothing(stack: RunningStack) -> None:
    pids = [*stack.pids("gateway"), *stack.pids("scheduler")]

    def cost(seconds: float) -> float:
        before = _cpu_seconds(pids)
        time.sleep(seconds)
        return (_cpu_seconds(pids) - before) / seconds

    seconds = 10.0
    alone = cost(seconds)
    clients = [httpx.Client(timeout=60) for _ in range(10)]
    streams = [client.stream("GET", f"{stack.url}/engine/events") for client in clients]
    answers = [stream.__enter__() for stream in streams]
    watched = cost(seconds)
    first = [next(answer.iter_text()) for answer in answers]
    for stream, client in zip(streams, clients, strict=True):
        stream.__exit__(None, None, None)
        client.close()
    assert all(text.startswith("data: {") for text in first)
    print(f"CPU of gateway and scheduler: {alone:.2%} without viewers, {watched:.2%} with ten")
    # Measured: 0.4 % of one core (docs/page.md). Ticks of 10 ms and other work are noise.
    if watched - alone > 0.02:
        pytest.fail(f"ten viewers cost {watched - alone:.2%} of a core")
