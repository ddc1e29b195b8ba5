"""A worker is killed from the page while the page's own answer streams."""

import httpx
import openai
import pytest
from playwright.sync_api import Page, expect

from support.page_actions import ANSWER, begin, finish, last_answer, set_field
from support.processes.stack_process import RunningStack, running_stack

PROMPT = "Tell me a story."


def test_a_worker_is_killed_and_not_a_character_is_lost(page: Page, stack: RunningStack) -> None:
    fields = {"seed": 11, "max_tokens": 900, "temperature": 0.8}
    for name, value in fields.items():
        set_field(page, name, str(value))
    set_field(page, "ignore_eos", True)
    worker = stack.pids("worker")
    begin(page, PROMPT)
    page.locator(f"{ANSWER} .token").nth(20).wait_for()
    page.get_by_role("button", name="Kill a worker").click()
    expect(page.locator("#toast")).to_contain_text("worker-0 was killed")
    expect(page.locator(f"{ANSWER} .state")).to_contain_text("Waiting for the engine")
    finish(page)
    errors = page.locator(f"{ANSWER} .error").all_text_contents()
    assert errors == [], "".join(stack.log[-20:])
    expect(page.locator(f"{ANSWER} .stats")).to_contain_text("900 tokens")
    expect(page.locator(f"{ANSWER} .stats")).to_contain_text("longest pause")
    assert stack.pids("worker") != worker

    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x")
    whole = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": PROMPT}],
        extra_body={"ignore_eos": True},
        **fields,  # type: ignore[arg-type]
    )
    assert last_answer(page) == whole.choices[0].message.content


def test_the_engine_shows_the_loss_and_the_return(page: Page) -> None:
    page.click("#to-engine")
    pill = page.locator(".worker .pill")
    expect(pill).to_have_text("ready", timeout=20_000)
    page.get_by_role("button", name="Kill this worker").click()
    expect(pill).to_contain_text("lost", timeout=20_000)
    expect(page.locator(".topology")).to_contain_text("no worker")
    expect(pill).to_have_text("ready", timeout=60_000)


def test_only_the_page_itself_may_ask(stack: RunningStack) -> None:
    kill = f"{stack.url}/engine/kill"
    workers = stack.pids("worker")
    assert httpx.post(kill, content="{}").status_code == 415
    wrong = httpx.post(kill, json={"worker": "unix:/nowhere"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (409, "no_worker")
    scheduler = httpx.post(kill, json={"worker": stack.grpc_address})
    assert scheduler.status_code == 409
    assert httpx.post(kill, json={"pid": 1}).status_code == 400
    assert httpx.post(kill, json={"worker": "x" * 2000}).status_code == 413
    assert httpx.get(kill).status_code == 405
    assert stack.pids("worker") == workers


@pytest.mark.timeout(120)
def test_without_the_flag_it_is_refused() -> None:
    with running_stack() as stack:
        workers = stack.pids("worker")
        assert httpx.get(f"{stack.url}/engine/playground").json() == {"playground": False}
        refused = httpx.post(f"{stack.url}/engine/kill", json={})
        assert refused.status_code == 403
        assert "--playground" in refused.json()["error"]["message"]
        assert stack.pids("worker") == workers
