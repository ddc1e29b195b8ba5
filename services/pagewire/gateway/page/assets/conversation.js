// A conversation: a tree of messages; one path is visible. Edited messages and further answers are
// siblings, so nothing is overwritten.

export class Conversation {
  constructor(saved = {}) {
    this.id = saved.id ?? crypto.randomUUID?.() ?? String(Date.now() + Math.random());
    this.updated = saved.updated ?? Date.now();
    // By id: { id, parent, role, content, reasoning, calls, callId, stats, error }.
    this.nodes = saved.nodes ?? {};
    // By parent ("" for the beginning): the visible child.
    this.chosen = saved.chosen ?? {};
    this.count = saved.count ?? 0;
  }

  get title() {
    const first = this.path().find((node) => node.role === "user");
    const line = first ? first.content.trim().split("\n")[0] : "";
    return line.length > 60 ? `${line.slice(0, 57)}…` : line || "New conversation";
  }

  get isEmpty() {
    return this.count === 0;
  }

  /** The visible messages, from the beginning. */
  path() {
    const nodes = [];
    for (let id = this.chosen[""]; id; id = this.chosen[id]) nodes.push(this.nodes[id]);
    return nodes;
  }

  /** The last visible message; null at the beginning. */
  end() {
    return this.path().at(-1) ?? null;
  }

  /** Adds a message after `parent` (null for the beginning), and shows it. */
  add(parent, message) {
    this.count += 1;
    const node = { id: `m${this.count}`, parent: parent?.id ?? "", content: "", ...message };
    this.nodes[node.id] = node;
    this.choose(node);
    return node;
  }

  choose(node) {
    this.chosen[node.parent] = node.id;
    this.updated = Date.now();
  }

  /** The messages with the same parent as a node, including itself, oldest first. */
  siblings(node) {
    return Object.values(this.nodes).filter((other) => other.parent === node.parent);
  }

  parentOf(node) {
    return this.nodes[node.parent] ?? null;
  }

  /** The path to a node, including it, in the form of the API. */
  messages(last, system) {
    const reversed = [];
    for (let node = last; node; node = this.parentOf(node)) reversed.push(asMessage(node));
    const start = system ? [{ role: "system", content: system }] : [];
    return [...start, ...reversed.reverse()];
  }

  toJSON() {
    const { id, updated, nodes, chosen, count } = this;
    return { id, updated, nodes, chosen, count };
  }
}

function asMessage(node) {
  if (node.role === "tool") {
    return { role: "tool", tool_call_id: node.callId, content: node.content };
  }
  const message = { role: node.role, content: node.content };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.calls?.length) message.tool_calls = node.calls;
  return message;
}
