// The engine, live: follows the gateway's events while the view is on the screen.

import { BlockMap, legend } from "./blocks.js";
import { byId, element } from "./dom.js";
import { Figures } from "./figures.js";
import { History } from "./history.js";
import { killButton } from "./playground.js";
import { prefixRows } from "./prefixes.js";
import { requestRows } from "./requests.js";
import { call, events } from "./server.js";
import { stepLegend, Timeline } from "./timeline.js";
import { Topology, workerName } from "./topology.js";

const RETRY_MS = 2000;
// A lost worker stays on the screen this long, so that its return is visible.
const LOST_SECONDS = 60;

export class Engine {
  constructor(onUnauthorized) {
    this._onUnauthorized = onUnauthorized;
    this._history = new History();
    this._figures = new Figures();
    this._topology = new Topology();
    this._cards = new Map(); // of workers, by scheduler and address
    this._abort = null;
    this._build();
    document.addEventListener("visibilitychange", () => this._follow());
    window.addEventListener("key", () => { this._disconnect(); this._follow(); });
  }

  set shown(value) {
    this._shown = value;
    this._follow();
  }

  _build() {
    this._status = element("p", { className: "engine-status", role: "status" }, "Connecting…");
    this._workers = element("div", { className: "workers" });
    this._requests = element("tbody");
    this._requestCount = element("span", { className: "soft" });
    const heads = ["Request", "Phase", "Worker", "Prompt", "From cache", "Output", "Progress"];
    byId("engine-view").append(
      element("h2", { className: "unseen" }, "Engine"),
      this._status,
      this._figures.root,
      panel("Who serves whom", this._topology.root),
      panel("Workers", legend(), stepLegend(), this._workers),
      panel("Requests", this._requestCount,
        element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Requests" },
          element("table", { className: "requests" },
            element("thead", {}, element("tr", {},
              ...heads.map((name) => element("th", { scope: "col" }, name)))),
            this._requests))),
    );
  }

  /** Connects only while the view is visible: watching costs the engine a little. */
  _follow() {
    const wanted = this._shown && document.visibilityState === "visible";
    if (wanted && !this._abort) this._connect();
    if (!wanted) this._disconnect();
  }

  _disconnect() {
    this._abort?.abort();
    this._abort = null;
  }

  async _connect() {
    const abort = this._abort = new AbortController();
    while (!abort.signal.aborted) {
      try {
        const response = await call("engine/events", { signal: abort.signal });
        for await (const state of events(response)) this._show(state);
        this._say("The gateway has ended the connection; trying again");
      } catch (error) {
        if (abort.signal.aborted) return;
        this._say(error.message);
        if (error.status === 401 || error.status === 403) {
          this._abort = null;
          this._onUnauthorized();
          return;
        }
      }
      await new Promise((resolve) => { setTimeout(resolve, RETRY_MS); });
    }
  }

  _say(text) {
    if (this._status.textContent !== text) this._status.textContent = text;
  }

  _show(state) {
    this._say("");
    const now = performance.now() / 1000;
    this._history.add(state, now);
    this._figures.show(this._history);
    this._topology.show(state);
    this._showWorkers(state, now);
    const rows = requestRows(state);
    this._requests.replaceChildren(...rows);
    const running = sum(state.schedulers, "running");
    const waiting = sum(state.schedulers, "waiting");
    this._requestCount.textContent = `${running} running, ${waiting} waiting`
      + (rows.length < running + waiting ? `, ${rows.length} shown` : "");
  }

  _showWorkers(state, now) {
    for (const scheduler of state.schedulers) {
      const { snapshot } = scheduler;
      const workers = [...snapshot?.workers ?? []];
      workers.sort((a, b) => a.address.localeCompare(b.address));
      for (const worker of workers) {
        const name = `${scheduler.target} ${worker.address}`;
        if (!this._cards.has(name)) {
          const card = new WorkerCard(workerName(worker.address), worker.address);
          this._cards.set(name, card);
          this._workers.append(card.root);
        }
        this._cards.get(name).show(worker, this._history.steps(scheduler.target, worker.address),
          snapshot.now, now);
      }
    }
    for (const [name, card] of this._cards) {
      const gone = now - card.seen;
      card.lostFor(gone);
      if (gone > LOST_SECONDS) {
        card.root.remove();
        this._cards.delete(name);
      }
    }
  }
}

class WorkerCard {
  constructor(name, address) {
    this.seen = 0;
    this._device = new BlockMap("Blocks on the device");
    this._host = new BlockMap("Blocks in host memory", true);
    this._timeline = new Timeline();
    this._about = element("p", { className: "soft" });
    this._state = element("span", { className: "pill" });
    this._prefixes = element("div", { className: "prefixes" });
    this._prefixCount = element("span", { className: "soft" });
    this.root = element("article", { className: "worker", "aria-label": name, title: address },
      element("header", {}, element("h4", {}, name), this._state, this._about,
        element("span", { className: "grow" }), killButton(address)),
      this._device.root, this._host.root, this._timeline.root,
      element("section", {},
        element("h5", {}, "Cached prefixes ", this._prefixCount), this._prefixes));
  }

  show(worker, steps, engineNow, now) {
    this.seen = now;
    this._about.textContent = `${worker.device} · ${worker.dtype} · ${worker.running} of `
      + `${worker.slots} slots`;
    this._state.textContent = worker.draining ? "draining" : "ready";
    this._device.show(worker.blocks);
    this._host.root.hidden = !worker.host;
    if (worker.host) this._host.show(worker.host);
    this._timeline.show(steps, engineNow);
    this._prefixes.replaceChildren(...prefixRows(worker.tree, worker.block_size));
    this._prefixCount.textContent = `${worker.tree.total} runs of blocks`;
  }

  lostFor(seconds) {
    const lost = seconds > 0.5;
    this.root.classList.toggle("lost", lost);
    if (lost) this._state.textContent = `lost for ${Math.round(seconds)} s`;
  }
}

function panel(title, ...children) {
  return element("section", { className: "panel" }, element("h3", {}, title), ...children);
}

function sum(rows, name) {
  return rows.reduce((total, row) => total + row[name], 0);
}

