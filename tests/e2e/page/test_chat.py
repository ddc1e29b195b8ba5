"""The chat in a real Chromium, against a real stack."""

import json
import subprocess
import sys

import openai
from playwright.sync_api import Page, expect

from support.page_actions import ANSWER, ask, begin, finish, last_answer, set_field
from support.processes.stack_process import RunningStack


def whole_answer(stack: RunningStack, text: str, **fields: object) -> str:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x")
    [model] = client.models.list().data
    messages = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(model=model.id, messages=messages, **fields)  # type: ignore[call-overload]
    return str(answer.choices[0].message.content)


def test_an_answer_streams_and_is_the_servers(page: Page, stack: RunningStack) -> None:
    set_field(page, "seed", "7")
    answer = ask(page, "What is the capital of France?")
    assert answer == whole_answer(stack, "What is the capital of France?", seed=7)
    expect(page.locator(f"{ANSWER} .body")).to_have_text(answer)
    expect(page.locator(f"{ANSWER} .stats")).to_contain_text("tokens")
    expect(page.locator(f"{ANSWER} .stats")).to_contain_text("first after")
    expect(page.locator("#announcements")).to_have_text(answer)
    assert page.evaluate("document.activeElement.id") == "message"


def test_a_token_shows_its_probability_and_others(page: Page) -> None:
    answer = ask(page, "Hello!")
    tokens = page.locator(f"{ANSWER} .token")
    assert "".join(tokens.all_text_contents()) == answer
    tokens.nth(1).hover()
    tip = page.locator("#tip")
    expect(tip).to_contain_text("%")
    expect(tip.locator("tr")).to_have_count(5)
    page.focus(f"{ANSWER} .body")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#announcements")).to_contain_text("Others:")


def test_an_answer_can_be_stopped(page: Page) -> None:
    set_field(page, "ignore_eos", True)
    set_field(page, "max_tokens", "400")
    begin(page, "Count.")
    page.locator(f"{ANSWER} .token").nth(5).wait_for()
    page.keyboard.press("Escape")
    finish(page)
    expect(page.locator(f"{ANSWER} .stats")).to_contain_text("stopped")
    assert last_answer(page)


def test_an_edit_is_a_branch_and_both_stay(page: Page) -> None:
    ask(page, "First question")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("Second question")
    page.get_by_role("button", name="Send as a new branch").click()
    finish(page)
    user = page.locator(".message.user")
    expect(user.locator(".body")).to_have_text("Second question")
    expect(user.locator(".branches")).to_contain_text("2 / 2")
    user.get_by_role("button", name="Earlier version").click()
    expect(user.locator(".body")).to_have_text("First question")
    page.get_by_role("button", name="Try again").click()
    finish(page)
    expect(page.locator(f"{ANSWER} .branches")).to_contain_text("2 / 2")
    page.reload()
    expect(page.locator(".message.user .branches")).to_contain_text("1 / 2")
    expect(page.locator("#chat-title")).to_have_text("First question")


def test_json_mode_answers_json(page: Page) -> None:
    set_field(page, "format", "json_schema")
    schema = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}}
    schema |= {"required": ["sky"], "additionalProperties": False}
    set_field(page, "schema", json.dumps(schema))
    set_field(page, "max_tokens", "300")
    answer = json.loads(ask(page, "Answer in JSON."))
    assert answer["sky"] in ("blue", "grey")


def test_a_tool_call_is_a_card_whose_result_goes_back(page: Page) -> None:
    page.click("#show-settings")
    page.click("text=Insert an example tool")
    tools = page.input_value("#set-tools")
    # The embedded model calls no tools by itself; a tool call replaces the API's answer.
    bodies: list[dict[str, object]] = []

    def answer(route: object, request: object) -> None:
        bodies.append(request.post_data_json)  # type: ignore[attr-defined]
        call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": '{"ci'}}
        rest = {"index": 0, "function": {"arguments": 'ty": "Oslo"}'}}
        deltas = [{"tool_calls": [call]}, {"tool_calls": [rest]}]
        if len(bodies) > 1:
            deltas = [{"reasoning_content": "It snows."}, {"content": "Take **a coat**."}]
        chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        route.fulfill(  # type: ignore[attr-defined]
            content_type="text/event-stream", body=f"{text}data: [DONE]\n\n"
        )

    page.route("**/v1/chat/completions", answer)
    page.fill("#message", "Weather in Oslo?")
    page.press("#message", "Enter")
    card = page.locator(".card")
    expect(card).to_contain_text("get_weather")
    expect(card.locator("pre")).to_contain_text('"city": "Oslo"')
    card.get_by_label("Result of get_weather").fill("snow")
    card.get_by_role("button", name="Send result").click()
    expect(page.locator(ANSWER).last.locator(".body strong")).to_have_text("a coat")
    reasoning = page.locator("details.reasoning")
    expect(reasoning).not_to_have_attribute("open", "")
    reasoning.locator("summary").click()
    expect(reasoning).to_contain_text("It snows.")
    assert bodies[0]["tools"] == json.loads(tools)
    assert bodies[1]["messages"][-1] == {  # type: ignore[index]
        "role": "tool",
        "tool_call_id": "c1",
        "content": "snow",
    }


def test_a_request_can_be_copied_and_runs(page: Page) -> None:
    set_field(page, "top_k", "5")
    set_field(page, "seed", "3")
    answer = ask(page, "It's a test")
    page.click("#copy-curl")
    expect(page.locator("#toast")).to_contain_text("copied")
    command = str(page.evaluate("navigator.clipboard.readText()"))
    out = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "[DONE]" in out.stdout, out.stderr
    page.click("#copy-python")
    expect(page.locator("#toast")).to_contain_text("Python copied")
    program = str(page.evaluate("navigator.clipboard.readText()"))
    assert 'extra_body={"top_k": 5}' in program
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == answer, ran.stderr


def test_the_models_text_is_never_markup(page: Page) -> None:
    text = "<img src=x onerror=alert(1)> `<b>` ```"
    ask(page, text)
    expect(page.locator(".message.user .body")).to_have_text(text)
    assert page.locator(".thread img").count() == 0


def test_a_wrong_setting_is_named(page: Page) -> None:
    set_field(page, "temperature", "9")
    begin(page, "Hello")
    finish(page)
    expect(page.locator(f"{ANSWER} .error")).to_contain_text("temperature")
    set_field(page, "tools", "{")
    page.fill("#message", "Hello again")
    page.press("#message", "Enter")
    expect(page.locator("#toast")).to_contain_text("Tools")


def test_every_control_can_be_reached_by_keys_and_has_a_name(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent").startswith("Skip")
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate("document.activeElement.id || document.activeElement.textContent")
        )
    order = ["to-chat", "to-engine", "model", "key-button", "new-chat", "copy-curl", "message"]
    assert [name for name in seen if name in order] == order
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")].filter(
          (e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)
        ).map((e) => e.outerHTML)"""
    )
    assert nameless == []
