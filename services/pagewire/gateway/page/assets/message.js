// One message of the conversation on the page.

import { announce, button, copy, element } from "./dom.js";
import { prose } from "./prose.js";
import { percent, visible } from "./tokens.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };
const LEAST_RENDER_MS = 60;

export class MessageView {
  /** `actions` are edit(node, text), again(node), sibling(node, step), answerTool(node, call, text),
   * and siblings(node), the messages with the same parent. */
  constructor(node, actions, tokens = null) {
    this.node = node;
    this._actions = actions;
    this._tokens = tokens; // { reasoning, content }: TokenText of each, or null
    this._body = element("div", { className: "body" });
    this._reasoning = null;
    this._calls = element("div", { className: "calls" });
    this._state = element("span", { className: "state" });
    this._foot = element("footer", {});
    this._timer = 0;
    this._renderMs = 0;
    this.article = element("article",
      { className: `message ${node.role}`, "aria-label": NAMES[node.role] },
      element("h3", { className: "who" }, NAMES[node.role] ?? node.role),
      this._body, this._calls, this._foot);
    this.render();
  }

  /** Schedules an update of a streamed answer; many calls make one update. */
  changed() {
    if (this._timer) return;
    const wait = Math.max(LEAST_RENDER_MS, 4 * this._renderMs);
    this._timer = setTimeout(() => { this._timer = 0; this.render(); }, wait);
  }

  set streaming(value) {
    this._streaming = value;
    this.article.setAttribute("aria-busy", String(value));
    this.article.classList.toggle("streaming", value);
    clearTimeout(this._timer);
    this._timer = 0;
    this.render();
  }

  /** The reason why the answer waits, or nothing. */
  set state(text) {
    this._state.textContent = text;
  }

  render() {
    const began = performance.now();
    this._renderReasoning();
    this._renderBody();
    this._calls.replaceChildren(...(this.node.calls ?? []).map((call) => this._card(call)));
    this._renderFoot();
    this._renderMs = performance.now() - began;
  }

  _renderReasoning() {
    const { reasoning } = this.node;
    if (!reasoning) return;
    if (this._reasoning === null) {
      this._thoughts = element("div", { className: "body" });
      this._reasoning = element("details", { className: "reasoning" },
        element("summary", {}, "Reasoning"), this._thoughts);
      this._body.before(this._reasoning);
    }
    this._thoughts.replaceChildren(prose(reasoning, this._leaf(reasoning, "reasoning")));
  }

  _renderBody() {
    const { role, content, error } = this.node;
    if (role === "assistant") {
      this._body.replaceChildren(prose(content, this._leaf(content, "content")));
    } else {
      this._body.replaceChildren(element("p", { className: "plain" }, content));
    }
    if (error) this._body.append(element("p", { className: "error", role: "alert" }, error));
    const inspects = Boolean(this._tokens?.content.tokens.length);
    if (inspects && this._body.tabIndex !== 0) this._inspectWithKeys();
  }

  /** Makes the nodes of a part of a text: a span for each token with a probability. */
  _leaf(text, part) {
    const tokens = this._tokens?.[part].tokens ?? [];
    return (from, to) => {
      const nodes = [];
      let at = from;
      for (let index = firstAfter(tokens, from); index < tokens.length; index += 1) {
        const token = tokens[index];
        if (token.from >= to) break;
        const [begin, end] = [Math.max(token.from, from), Math.min(token.to, to)];
        if (begin > at) nodes.push(text.slice(at, begin));
        const unlikely = token.logprob < -2.3 ? " unlikely" : token.logprob < -0.7 ? " unsure" : "";
        const span = element("span", { className: `token${unlikely}` }, text.slice(begin, end));
        span.token = token;
        nodes.push(span);
        at = end;
      }
      if (at < to) nodes.push(text.slice(at, to));
      return nodes;
    };
  }

  /** Left and right arrows move from token to token, as the pointer does. */
  _inspectWithKeys() {
    this._body.tabIndex = 0;
    this._body.setAttribute("aria-description", "Left and right arrows read token probabilities");
    let index = -1;
    this._body.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || event.target !== this._body) return;
      const spans = this._body.querySelectorAll(".token");
      if (!spans.length) return;
      event.preventDefault();
      index = Math.min(Math.max(index + step, 0), spans.length - 1);
      this._body.querySelector(".token.current")?.classList.remove("current");
      spans[index].classList.add("current");
      const { text, logprob, top } = spans[index].token;
      const others = top.filter((other) => other.text !== text).slice(0, 3)
        .map((other) => `${visible(other.text)} ${percent(other.logprob)}`);
      announce(`${visible(text)}: ${percent(logprob)}. Others: ${others.join(", ") || "none"}`);
      spans[index].dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
    });
  }

  _card(call) {
    const card = element("section", { className: "card", "aria-label": "Tool call" },
      element("h4", {}, "Calls ", element("code", {}, call.function.name)),
      element("pre", { tabIndex: 0, role: "group", "aria-label": "Arguments" },
        element("code", {}, indented(call.function.arguments))));
    const answers = this._actions.siblingsOf(this.node);
    if (this._streaming || answers.some((node) => node.callId === call.id)) return card;
    const field = element("textarea", { rows: 2, placeholder: "Result of the tool",
      "aria-label": `Result of ${call.function.name}` });
    card.append(field, button("Send result", () => {
      this._actions.answerTool(this.node, call, field.value);
    }));
    return card;
  }

  _renderFoot() {
    const { node } = this;
    if (this._streaming) {
      this._foot.replaceChildren(this._state);
      return;
    }
    const parts = [];
    const siblings = this._actions.siblings(node);
    if (siblings.length > 1) {
      const place = siblings.indexOf(node) + 1;
      parts.push(element("span", { className: "branches", role: "group",
        "aria-label": `Version ${place} of ${siblings.length}` },
      button("‹", () => this._actions.sibling(node, -1),
        { "aria-label": "Earlier version", disabled: place === 1 }),
      `${place} / ${siblings.length}`,
      button("›", () => this._actions.sibling(node, 1),
        { "aria-label": "Later version", disabled: place === siblings.length })));
    }
    parts.push(button("Copy", () => copy(node.content, "Text")));
    if (node.role === "user") parts.push(button("Edit", () => this._edit()));
    if (node.role === "assistant") parts.push(button("Try again", () => this._actions.again(node)));
    if (node.stats) parts.push(element("span", { className: "stats" }, node.stats));
    this._foot.replaceChildren(...parts);
  }

  _edit() {
    const field = element("textarea", { value: this.node.content, rows: 3,
      "aria-label": "Edited message" });
    const done = () => this._actions.edit(this.node, field.value);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); done(); }
      if (event.key === "Escape") { event.stopPropagation(); this.render(); }
    });
    this._body.replaceChildren(field);
    this._foot.replaceChildren(button("Send as a new branch", done, { className: "main" }),
      button("Cancel", () => this.render()));
    field.focus();
  }
}

/** The first token that ends after a place. */
function firstAfter(tokens, place) {
  let [low, high] = [0, tokens.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tokens[middle].to <= place) low = middle + 1;
    else high = middle;
  }
  return low;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet
  }
}
