// One streamed answer: its pieces, and their times.

import { call, events, ServerError } from "./server.js";
import { TokenText } from "./tokens.js";

// A longer silence is shown while it lasts, and reported after the answer has ended.
const PAUSE_MS = 400;

export class Answer {
  /** Writes the answer into `node`, and calls `changed()` after each piece. */
  constructor(node, body, changed) {
    this.node = node;
    this.tokens = { reasoning: new TokenText(), content: new TokenText() };
    this.numTokens = 0;
    this.pauseMs = 0;
    this._body = body;
    this._changed = changed;
    this._abort = new AbortController();
    this._began = performance.now();
    this._first = this._last = 0;
  }

  /** Milliseconds since the latest piece; 0 before the first piece. */
  get silentMs() {
    return this._first ? performance.now() - this._last : 0;
  }

  /** Tokens per second after the first token, by the server's token count. */
  get rate() {
    return this._last > this._first ? (this.numTokens - 1) / ((this._last - this._first) / 1000) : 0;
  }

  stop() {
    this._abort.abort();
  }

  /** Runs to the end. An error is stored in the node. */
  async run() {
    const { node } = this;
    try {
      const response = await call("v1/chat/completions", {
        method: "POST", body: JSON.stringify(this._body), signal: this._abort.signal,
      });
      for await (const event of events(response)) this._take(event);
      if (!node.finish) node.error = "The connection ended before the answer did";
    } catch (error) {
      if (error.name === "AbortError") node.stopped = true;
      else if (error instanceof ServerError) [node.error, node.status] = [error.message, error.status];
      else node.error = `The connection broke: ${error.message}`;
    }
    node.stats = this._stats();
  }

  _take(event) {
    if (event.error) throw new ServerError(event.error.code, event.error.message);
    if (event.usage) this.numTokens = event.usage.completion_tokens;
    const choice = event.choices?.[0];
    if (!choice) return;
    const { delta } = choice;
    if (choice.finish_reason) this.node.finish = choice.finish_reason;
    const [reasoning, content] = [delta.reasoning_content ?? "", delta.content ?? ""];
    if (reasoning || content || delta.tool_calls) this._note(choice.logprobs?.content);
    this.node.reasoning = (this.node.reasoning ?? "") + reasoning;
    this.node.content += content;
    const part = reasoning ? "reasoning" : "content";
    this.tokens[part].add(reasoning || content, choice.logprobs?.content);
    for (const call of delta.tool_calls ?? []) this._addCall(call);
    this._changed();
  }

  _note(logprobs) {
    const now = performance.now();
    if (!this._first) this._first = now;
    else this.pauseMs = Math.max(this.pauseMs, now - this._last);
    this._last = now;
    this.numTokens += logprobs?.length ?? 1;
  }

  _addCall({ index, id, function: called }) {
    const calls = this.node.calls ??= [];
    calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    calls[index].function.name += called?.name ?? "";
    calls[index].function.arguments += called?.arguments ?? "";
  }

  _stats() {
    if (!this._first) return this.node.stopped ? "stopped" : "";
    const parts = [`${this.numTokens} tokens`];
    if (this.rate) parts.push(`${this.rate.toFixed(1)} tokens/s`);
    parts.push(`first after ${Math.round(this._first - this._began)} ms`);
    if (this.pauseMs > PAUSE_MS) parts.push(`longest pause ${(this.pauseMs / 1000).toFixed(1)} s`);
    if (this.node.stopped) parts.push("stopped");
    if (this.node.finish === "length") parts.push("reached the limit of tokens");
    return parts.join(" · ");
  }
}

export { PAUSE_MS };
