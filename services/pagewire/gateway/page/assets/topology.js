// Gateways, schedulers and workers in three columns, and their connections.

import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";

export class Topology {
  constructor() {
    this._lines = document.createElementNS(SVG, "svg");
    this._lines.setAttribute("aria-hidden", "true");
    this._columns = element("div", { className: "columns" });
    this.root = element("div", { className: "topology" }, this._columns);
    this._columns.append(this._lines);
    this._drawn = "";
    new ResizeObserver(() => this._draw()).observe(this.root);
  }

  show(state) {
    const gateways = new Map([["this", { name: "this gateway", open: 0, to: [] }]]);
    const schedulers = [];
    const workers = [];
    const several = new Set(state.schedulers.flatMap((each) => each.models)).size > 1;
    state.schedulers.forEach((scheduler, place) => {
      const id = `s${place}`;
      const { models, target } = scheduler;
      const name = several ? `${models.join(", ")} at ${target}` : target;
      schedulers.push({ id, name, state: scheduler.state,
        note: `${scheduler.running} running, ${scheduler.waiting} waiting` });
      gateways.get("this").open += scheduler.open;
      if (scheduler.state !== "lost") gateways.get("this").to.push(id);
      for (const gateway of scheduler.snapshot?.gateways ?? []) {
        if (gateway.this) continue;
        const host = gateway.peer.replace(/^ipv[46]:/, "");
        const other = gateways.get(host) ?? { name: host, open: 0, to: [] };
        other.open += gateway.open;
        other.to.push(id);
        gateways.set(host, other);
      }
      const known = [...scheduler.snapshot?.workers ?? []];
      known.sort((a, b) => a.address.localeCompare(b.address));
      for (const worker of known) {
        workers.push({ id: `w${workers.length}`, from: id, name: workerName(worker.address),
          title: worker.address, state: worker.draining ? "draining" : "ready",
          note: `${worker.running} of ${worker.slots} slots` });
      }
    });
    this._columns.replaceChildren(this._lines,
      column("Gateways", [...gateways].map(([id, { name, open }]) =>
        box(`g${id}`, name, `${open} open`, "ready"))),
      column("Schedulers", schedulers.map(({ id, name, note, state: now }) =>
        box(id, name, note, now))),
      column("Workers", workers.map(({ id, name, title, note, state: now }) =>
        box(id, name, note, now, title))));
    this._edges = [
      ...[...gateways].flatMap(([id, { to, open }]) => to.map((s) => [`g${id}`, s, open > 0])),
      ...workers.map(({ id, from, note }) => [from, id, !note.startsWith("0 ")]),
    ];
    this._draw();
  }

  _draw() {
    const frame = this._columns.getBoundingClientRect();
    if (!frame.width || !this._edges) return;
    const boxes = new Map([...this._columns.querySelectorAll(".box")]
      .map((node) => [node.dataset.id, node.getBoundingClientRect()]));
    this._lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    this._lines.replaceChildren(...this._edges.map(([from, to, active]) => {
      const [a, b] = [boxes.get(from), boxes.get(to)];
      const path = document.createElementNS(SVG, "path");
      const [x1, y1] = [a.right - frame.left, (a.top + a.bottom) / 2 - frame.top];
      const [x2, y2] = [b.left - frame.left, (b.top + b.bottom) / 2 - frame.top];
      const middle = (x1 + x2) / 2;
      path.setAttribute("d", `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`);
      path.setAttribute("class", active ? "active" : "");
      return path;
    }));
  }
}

function column(title, boxes) {
  return element("div", { className: "column" }, element("h4", {}, title),
    element("ul", {}, ...boxes));
}

function box(id, name, note, state, title = name) {
  const made = element("li", { className: `box ${state.replace(" ", "-")}`, title },
    element("strong", {}, name), element("span", { className: "soft" },
      state === "ready" ? note : `${state}, ${note}`));
  made.dataset.id = id;
  return made;
}

/** A short name for a worker's address: for a socket, the name of its file. */
export function workerName(address) {
  return address.startsWith("unix:") ? address.split("/").pop().replace(/\.sock$/, "") : address;
}
