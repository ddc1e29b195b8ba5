// The chat: the conversations, the visible one, and its streamed answer.

import { Answer, PAUSE_MS } from "./answer.js";
import { Conversation } from "./conversation.js";
import { announce, button, byId, copy, element, toast } from "./dom.js";
import { MessageView } from "./message.js";
import { SettingError, Settings } from "./settings.js";
import * as snippet from "./snippet.js";
import * as storage from "./storage.js";
import { percent, visible } from "./tokens.js";

export class Chat {
  /** `onUnauthorized` asks for a key. */
  constructor(onUnauthorized) {
    this._onUnauthorized = onUnauthorized;
    this._settings = new Settings();
    this._conversations = storage.conversations();
    this._current = this._conversations[0] ?? new Conversation();
    this._answer = null;
    this._tokens = new Map(); // tokens of this page's answers, by node; not stored
    this._actions = {
      siblings: (node) => this._current.siblings(node),
      siblingsOf: (node) => Object.values(this._current.nodes).filter((n) => n.parent === node.id),
      sibling: (node, step) => this._showSibling(node, step),
      edit: (node, text) => this._edit(node, text),
      again: (node) => this._again(node),
      answerTool: (node, call, text) => this._answerTool(node, call, text),
    };
    this._listen();
    this._show();
  }

  get streaming() {
    return this._answer !== null;
  }

  /** Sends the text of the message field. */
  async send() {
    const field = byId("message");
    const text = field.value.trim();
    if (!text || this.streaming) return;
    field.value = "";
    this._fit();
    const node = this._current.add(this._current.end(), { role: "user", content: text });
    await this._generate(node);
  }

  stop() {
    this._answer?.stop();
  }

  _listen() {
    const field = byId("message");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    field.addEventListener("input", () => this._fit());
    byId("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !byId("key-dialog").open) this.stop();
    });
    byId("new-chat").addEventListener("click", () => this._open(new Conversation()));
    byId("copy-curl").addEventListener("click", () => this._copy(snippet.curl, "curl command"));
    byId("copy-python").addEventListener("click", () => this._copy(snippet.python, "Python"));
    toggle("show-settings", "settings");
    toggle("show-conversations", "conversations");
    byId("thread").addEventListener("scroll", () => { this._follows = atEnd(); });
    inspectTokens(byId("thread"));
  }

  _open(conversation) {
    this.stop();
    this._current = conversation;
    this._show();
    byId("conversations").classList.remove("open");
    byId("show-conversations").setAttribute("aria-expanded", "false");
    byId("message").focus();
  }

  _show() {
    this._showList();
    this._views = new Map();
    const views = this._current.path().map((node) => this._view(node).article);
    byId("thread").replaceChildren(...(views.length ? views : [greeting()]));
    byId("chat-title").textContent = this._current.title;
    this._follows = true;
    follow();
  }

  _view(node) {
    const view = new MessageView(node, this._actions, this._tokens.get(node));
    this._views.set(node, view);
    return view;
  }

  _showList() {
    const items = this._conversations.map((conversation) => {
      const current = conversation === this._current;
      return element("li", {},
        button(conversation.title, () => this._open(conversation),
          { className: "title", "aria-current": current ? "true" : null }),
        button("×", () => this._remove(conversation),
          { className: "remove", "aria-label": `Delete ${conversation.title}` }));
    });
    byId("chat-list").replaceChildren(...items);
  }

  _remove(conversation) {
    if (!confirm(`Delete “${conversation.title}”?`)) return;
    storage.remove(conversation);
    this._conversations = this._conversations.filter((other) => other !== conversation);
    if (conversation === this._current) this._open(this._conversations[0] ?? new Conversation());
    else this._showList();
  }

  _keep() {
    const others = this._conversations.filter((other) => other !== this._current);
    this._conversations = [this._current, ...others];
    storage.save(this._current);
    byId("chat-title").textContent = this._current.title;
    this._showList();
  }

  _showSibling(node, step) {
    const siblings = this._current.siblings(node);
    const other = siblings[siblings.indexOf(node) + step];
    if (!other || this.streaming) return;
    this._current.choose(other);
    this._keep();
    this._show();
    const place = `Version ${siblings.indexOf(other) + 1} of ${siblings.length}`;
    announce(place);
    this._views.get(other).article.querySelector(".branches button:enabled")?.focus();
  }

  async _edit(node, text) {
    if (this.streaming || !text.trim()) return;
    const parent = this._current.parentOf(node);
    await this._generate(this._current.add(parent, { role: "user", content: text.trim() }));
  }

  async _again(node) {
    if (!this.streaming) await this._generate(this._current.parentOf(node));
  }

  /** Adds the result of a call; the model continues when every call has a result. */
  async _answerTool(node, call, text) {
    if (this.streaming) return;
    const end = this._current.end();
    const result = this._current.add(end, { role: "tool", callId: call.id, content: text });
    const answered = new Set(this._current.path().map((other) => other.callId));
    if (node.calls.every((other) => answered.has(other.id))) {
      await this._generate(result);
    } else {
      this._keep();
      this._show();
    }
  }

  _body(last) {
    const model = byId("model").value;
    const messages = this._current.messages(last, this._settings.system);
    const fields = this._settings.fields();
    return { model, messages, stream: true, stream_options: { include_usage: true }, ...fields };
  }

  /** Streams an answer to `last`, a message of the user or of a tool. */
  async _generate(last) {
    let body;
    try {
      body = this._body(last);
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this._show();
      toast(error.message);
      return;
    }
    const conversation = this._current;
    const node = conversation.add(last, { role: "assistant" });
    const answer = new Answer(node, body, () => this._arrived(answer));
    this._answer = answer;
    this._tokens.set(node, answer.tokens);
    this._keep();
    this._show();
    this._setStreaming(true);
    this._views.get(node).streaming = true;
    announce("The model answers");
    const watch = setInterval(() => this._showState(answer), 200);
    await answer.run();
    clearInterval(watch);
    if (this._answer === answer) {
      this._answer = null;
      this._setStreaming(false);
    }
    storage.save(conversation);
    const view = this._views.get(node);
    if (view) view.streaming = false;
    announce(node.error ?? spoken(node));
    if (this._follows) follow();
    if (node.status === 401) this._onUnauthorized();
  }

  _arrived(answer) {
    this._views.get(answer.node)?.changed();
    if (this._follows) requestAnimationFrame(follow);
  }

  _showState(answer) {
    const view = this._views.get(answer.node);
    if (!view) return;
    const { silentMs } = answer;
    if (silentMs > PAUSE_MS) {
      view.state = `Waiting for the engine for ${(silentMs / 1000).toFixed(1)} s`;
    } else {
      view.state = answer.rate ? `${answer.rate.toFixed(1)} tokens/s` : "Waiting for the first token";
    }
    if (this._follows) follow();
  }

  _setStreaming(streaming) {
    byId("send").hidden = streaming;
    byId("stop").hidden = !streaming;
    document.body.classList.toggle("streaming", streaming);
    if (streaming) byId("stop").focus();
    else byId("message").focus();
  }

  _copy(write, what) {
    const path = this._current.path();
    const last = path.at(-1)?.role === "assistant" ? path.at(-2) : path.at(-1);
    const draft = byId("message").value.trim();
    try {
      const body = this._body(last ?? null);
      if (!last) body.messages.push({ role: "user", content: draft || "Hello!" });
      copy(write(body), what);
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      toast(error.message);
    }
  }

  /** Makes the message field as high as its text. */
  _fit() {
    const field = byId("message");
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight + 2, 240)}px`;
  }
}

function greeting() {
  return element("div", { className: "empty" },
    element("p", { className: "big" }, "Ask the model something."),
    element("p", {}, "The answer streams here with the probability of each token. Messages can be "
      + "edited, and every edit is a branch. Conversations stay in this browser."));
}

function spoken(node) {
  if (node.stopped) return "Stopped";
  const calls = (node.calls ?? []).map((call) => `Calls ${call.function.name}.`).join(" ");
  return `${node.content} ${calls}`.trim() || "The answer is empty";
}

function atEnd() {
  const thread = byId("thread");
  return thread.scrollHeight - thread.scrollTop - thread.clientHeight < 60;
}

function follow() {
  const thread = byId("thread");
  thread.scrollTop = thread.scrollHeight;
}

function toggle(buttonId, panelId) {
  const panel = byId(panelId);
  byId(buttonId).addEventListener("click", () => {
    const side = panelId === "settings";
    const open = side ? panel.hidden : !panel.classList.contains("open");
    if (side) panel.hidden = !open;
    else panel.classList.toggle("open", open);
    byId(buttonId).setAttribute("aria-expanded", String(open));
    if (open) panel.querySelector("textarea, button")?.focus();
  });
}

/** Shows the probability of the token under the pointer, and other likely tokens. */
function inspectTokens(thread) {
  const tip = byId("tip");
  thread.addEventListener("mouseover", (event) => {
    const { token } = event.target;
    tip.hidden = !token;
    if (!token) return;
    const rows = token.top.map((other) => element("tr",
      { className: other.text === token.text ? "chosen" : "" },
      element("td", {}, visible(other.text)), element("td", {}, percent(other.logprob)),
      element("td", {}, element("meter", { value: Math.exp(other.logprob), "aria-hidden": "true" }))));
    tip.replaceChildren(
      element("p", {}, element("code", {}, visible(token.text)), ` ${percent(token.logprob)}`),
      element("table", {}, element("tbody", {}, ...rows)));
    const box = event.target.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    const below = box.bottom + tip.offsetHeight + 8 < innerHeight;
    tip.style.top = `${below ? box.bottom + 4 : box.top - tip.offsetHeight - 4}px`;
  });
  const hide = () => { tip.hidden = true; };
  thread.addEventListener("mouseleave", hide);
  thread.addEventListener("scroll", hide);
  thread.addEventListener("focusout", hide);
}
